"""Sums of a validation over samples, by where they come from. Means are taken of the sums at the end, never of means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchbox.trainer.sample_table import LEADING, SampleTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.data.samples.provenance import Provenance

DATASET, SOURCE, CONTROL_MODE, LOSS = (LEADING.index(name) for name in LEADING[1:])
PER_TERM = 4  # sum of the means of samples, samples with the term, sum, count


class ValidationSums:
    """Sums over samples for every dataset and control mode, for every source, and over the batches of a validation.

    The loss of a group is the mean over its samples of their losses, and a term the mean over the samples that have it of
    sum / count, as in training.
    """

    def __init__(self, layout: SampleTable) -> None:
        self._layout = layout
        self._groups: dict[tuple[int, ...], np.ndarray] = {}  # by dataset and control mode
        self._sources: dict[tuple[int, ...], np.ndarray] = {}
        self._batch_sums = np.zeros(2 + 2 * len(layout.parts))

    def add(self, rows: np.ndarray, batch_sums: np.ndarray) -> None:
        """Add the samples of a batch of all ranks, as `SampleTable.unpack` returns them."""
        self._batch_sums += batch_sums
        values = self._values(rows)
        _add_by_key(self._groups, rows[:, [DATASET, CONTROL_MODE]], values)
        _add_by_key(self._sources, rows[:, [SOURCE]], values)

    def summary(self, provenance: Provenance, shares: Sequence[float]) -> dict[str, Any]:
        """Return loss, terms and groups with the names of `provenance`.

        `loss` and `terms` are weighted over datasets by their `shares` in the training, normalised over those that have samples
        here, and of a term over those that have samples with it. `unweighted` is over all samples. Without losses per sample,
        `loss` and `terms` are over all samples.
        """
        samples, total = int(self._batch_sums[0]), float(self._batch_sums[1])
        pairs = zip(self._layout.parts, self._batch_sums[2:].reshape(-1, 2).tolist(), strict=True)
        parts = {name: value / number for name, (value, number) in pairs if number}
        if not self._groups:
            return {"loss": total / samples, "samples": samples, "terms": parts, "per_sample": False}
        datasets = {
            number: np.sum([sums for (dataset, _), sums in self._groups.items() if dataset == number], axis=0)
            for number in sorted({dataset for dataset, _ in self._groups})
        }
        weights = np.array([shares[number] for number in datasets])
        sums = np.stack(list(datasets.values()))  # (datasets, 2 + 4 terms)
        columns = {name: 2 + PER_TERM * term for term, name in enumerate(self._layout.terms)}
        return {
            "loss": _weighted_mean(weights, sums[:, 1], sums[:, 0]),
            "samples": samples,
            "terms": {
                name: _weighted_mean(weights, sums[:, column], sums[:, column + 1])
                for name, column in columns.items()
                if sums[:, column + 1].any()
            },
            "parts": parts,
            "per_sample": True,
            "unweighted": self._describe(sums.sum(axis=0)),
            "weights": [
                {"dataset": provenance.datasets[number], "weight": weight / weights.sum()}
                for number, weight in zip(datasets, weights.tolist(), strict=True)
            ],
            "groups": [
                {"dataset": provenance.datasets[number], "control_mode": provenance.control_modes[mode]} | self._describe(group)
                for (number, mode), group in sorted(self._groups.items())
            ],
            "sources": [
                {"source": provenance.sources[number]} | self._describe(group)
                for (number,), group in sorted(self._sources.items())
            ],
        }

    def _values(self, rows: np.ndarray) -> np.ndarray:
        """Return what is summed of every sample: 1, its loss, and the four values of every term (samples, 2 + 4 terms)."""
        columns = [np.ones(len(rows)), rows[:, LOSS]]
        for start in range(len(LEADING), self._layout.columns, 2):
            total, count = rows[:, start], rows[:, start + 1]
            columns += [total / np.maximum(count, 1.0), count > 0, total, count]
        return np.stack(columns, axis=1)

    def _describe(self, sums: np.ndarray) -> dict[str, Any]:
        terms = {}
        for name, (means, samples, total, count) in zip(
            self._layout.terms, sums[2:].reshape(-1, PER_TERM).tolist(), strict=True
        ):
            mean = means / samples if samples else None
            terms[name] = {"mean": mean, "samples": int(samples), "sum": total, "count": count}
        return {"samples": int(sums[0]), "loss": float(sums[1] / sums[0]), "terms": terms}


def _add_by_key(sums: dict[tuple[int, ...], np.ndarray], keys: np.ndarray, values: np.ndarray) -> None:
    """Add the rows of values (n, v) to the sums of their keys (n, k)."""
    for key in np.unique(keys, axis=0):
        selected = values[(keys == key).all(axis=1)].sum(axis=0)
        name = tuple(int(number) for number in key)
        sums[name] = sums[name] + selected if name in sums else selected


def _weighted_mean(weights: np.ndarray, sums: np.ndarray, numbers: np.ndarray) -> float:
    """Return the mean of sums / numbers of groups, weighted; groups with the number 0 have no part in it. All are (groups,)."""
    present = numbers > 0
    return float((weights[present] * sums[present] / numbers[present]).sum() / weights[present].sum())
