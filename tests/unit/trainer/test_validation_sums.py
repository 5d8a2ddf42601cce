"""Sums of a validation: what they are of, and that no mean of means is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchbox.data.samples.provenance import Provenance
from benchbox.registry.contracts import Losses
from benchbox.trainer.sample_table import SampleTable
from benchbox.trainer.validation_sums import ValidationSums

PROVENANCE = Provenance(("a", "b", "c"), ("lab", "field"), ("joint", "ee"))
SHARES = [0.5, 0.3, 0.2]


def batch_of(datasets: list[int], sources: list[int], modes: list[int]) -> dict[str, torch.Tensor]:
    columns = {"dataset_index": datasets, "source_index": sources, "control_mode_index": modes, "frame_index": datasets}
    return {name: torch.tensor(values) for name, values in columns.items()}


def losses_of(terms: dict[str, list[tuple[float, float]]], *, sample_losses: list[float] | None = None) -> Losses:
    """Return losses from (sum, count) of every sample and term, with a part besides."""
    pairs = {name: tuple(torch.tensor(values).unbind(1)) for name, values in terms.items()}
    ratios = [total / count.clamp(min=1) for total, count in pairs.values()]
    total = torch.stack(ratios).sum(0) if sample_losses is None else torch.tensor(sample_losses)
    own = None if sample_losses is None else torch.tensor(sample_losses)
    return Losses(total.mean(), {"correct": torch.tensor(0.5)}, pairs, {"correct": torch.tensor(2.0)}, own)


def summed(*batches: tuple[Losses, dict[str, torch.Tensor], bool], rows: int = 4) -> dict[str, Any]:
    """Return the summary of batches, each of one rank."""
    layout = SampleTable.of(batches[0][0], rows)
    sums = ValidationSums(layout)
    vectors = [layout.pack(losses, batch, counts=counts) for losses, batch, counts in batches]
    sums.add(*layout.unpack(torch.stack(vectors)))
    return sums.summary(PROVENANCE, SHARES)


def test_samples_of_ragged_batches_are_summed_by_dataset_and_mode_and_by_source() -> None:
    first = losses_of({"flow": [(2, 4), (3, 1), (0, 0)], "text": [(1, 2), (0, 0), (0, 0)]})  # losses 1, 3, 0
    second = losses_of({"flow": [(10, 2)], "text": [(4, 1)]})  # loss 9
    repeated = losses_of({"flow": [(99, 1)], "text": [(99, 1)]})
    summary = summed(
        (first, batch_of([0, 0, 1], [0, 0, 1], [0, 0, 1]), True),
        (second, batch_of([1], [0], [1]), True),
        (repeated, batch_of([2], [1], [0]), False),
    )
    assert summary["samples"] == 4
    assert summary["groups"] == [
        {
            "dataset": "a",
            "control_mode": "joint",
            "samples": 2,
            "loss": 2.0,
            "terms": {
                "flow": {"mean": 1.75, "samples": 2, "sum": 5.0, "count": 5.0},
                "text": {"mean": 0.5, "samples": 1, "sum": 1.0, "count": 2.0},
            },
        },
        {
            "dataset": "b",
            "control_mode": "ee",
            "samples": 2,
            "loss": 4.5,
            "terms": {
                "flow": {"mean": 5.0, "samples": 1, "sum": 10.0, "count": 2.0},
                "text": {"mean": 4.0, "samples": 1, "sum": 4.0, "count": 1.0},
            },
        },
    ]
    assert [(group["source"], group["samples"], group["loss"]) for group in summary["sources"]] == [
        ("lab", 3, pytest.approx(13 / 3)),
        ("field", 1, 0.0),
    ]
    assert (summary["unweighted"]["samples"], summary["unweighted"]["loss"]) == (4, 13 / 4)
    assert summary["parts"] == {"correct": 0.5}


def test_datasets_are_weighted_by_their_shares_among_those_that_have_samples() -> None:
    losses = losses_of({"flow": [(1, 1), (1, 1), (5, 1)], "text": [(0, 0), (0, 0), (2, 1)]})
    summary = summed((losses, batch_of([0, 0, 1], [0, 0, 0], [0, 0, 0]), True))
    assert summary["weights"] == [
        {"dataset": "a", "weight": pytest.approx(0.625)},
        {"dataset": "b", "weight": pytest.approx(0.375)},
    ]
    assert summary["loss"] == pytest.approx(0.625 * 1 + 0.375 * 7)
    assert summary["terms"] == pytest.approx({"flow": 0.625 * 1 + 0.375 * 5, "text": 2.0}), "only dataset b has text"


def test_a_term_that_no_sample_has_is_left_out_of_the_means() -> None:
    summary = summed((losses_of({"flow": [(1, 1)], "text": [(0, 0)]}), batch_of([0], [0], [0]), True))
    assert summary["terms"] == {"flow": 1.0}
    assert summary["unweighted"]["terms"]["text"] == {"mean": None, "samples": 0, "sum": 0.0, "count": 0.0}


def test_the_loss_of_a_sample_is_that_of_training_where_terms_have_weights_in_it() -> None:
    losses = losses_of({"left": [(1, 1), (2, 1)], "right": [(3, 1), (4, 1)]}, sample_losses=[2.5, 3.5])
    assert summed((losses, batch_of([0, 0], [0, 0], [0, 0]), True))["loss"] == 3.0


def test_without_losses_per_sample_batches_are_weighted_by_their_samples() -> None:
    def losses(total: float, part: float, with_part: int) -> Losses:
        return Losses(torch.tensor(total), {"text": torch.tensor(part)}, None, {"text": torch.tensor(float(with_part))})

    summary = summed(
        (losses(1.0, 4.0, 1), batch_of([0] * 3, [0] * 3, [0] * 3), True),
        (losses(5.0, 1.0, 3), batch_of([0] * 5, [0] * 5, [0] * 5), True),
        (losses(9.0, 9.0, 1), batch_of([0], [0], [0]), False),
    )
    assert summary == {"loss": (3 + 25) / 8, "samples": 8, "terms": {"text": (4 + 3) / 4}, "per_sample": False}
