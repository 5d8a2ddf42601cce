"""pi05 in the sizes of `reports/collapse`."""

from ..pi05.policy import build as build
