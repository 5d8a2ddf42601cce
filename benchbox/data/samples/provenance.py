"""Provenance of samples: the names that the numbers in a batch stand for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Provenance:
    """Names of datasets, sources and control modes, by `dataset_index`, `source_index` and `control_mode_index`.

    All are empty where a policy generates its own batches.
    """

    datasets: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    control_modes: tuple[str, ...] = ()
