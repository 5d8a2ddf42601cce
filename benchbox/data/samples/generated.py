"""Sources of samples that are generated, and read from no dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.data.order.groups import generated_group

if TYPE_CHECKING:
    from benchbox.data.order.groups import SampleGroup

SAMPLES = 4096
"""Samples in an epoch."""


class GeneratedSource:
    """Source of `SAMPLES` samples, each an episode of its own, without videos."""

    def __len__(self) -> int:
        return SAMPLES

    @property
    def decoder(self) -> None:
        """Nothing: no video is decoded."""
        return

    def groups(self) -> list[SampleGroup]:
        """One group of all samples."""
        return [generated_group(SAMPLES)]

    def episode_of(self, index: int) -> int:
        """Return the index: every sample is an episode of its own."""
        return index
