"""Mean FLOPs of steps that differ in shape: unknown for a reason where the formula cannot tell them from one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.measure.flops import DEVICE_PEAKS
from benchbox.measure.outlines import BatchOutline
from benchbox.measure.probe import ProbeResult
from benchbox.theory.flops import Product
from benchbox.worker.step_flops import mean_flops

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchbox.registry.launch_record import Flops
    from benchbox.store.rank_result import Utilisation

META = torch.device("meta")
PEAK = 1e12


class Formula:
    """Policy with 1000 FLOPs for each token, and twice as many in the backward pass."""

    def __init__(self, *, fused: bool = False) -> None:
        self.fused = fused
        self.devices: set[str] = set()

    def work(self, batch: dict[str, torch.Tensor]) -> list[Product]:
        self.devices |= {tensor.device.type for tensor in batch.values()}
        tokens = batch["prompt_tokens"].shape[1]
        return [Product(tower="backbone", flops=1000 * tokens, gradients=2, fused=self.fused and tokens > 1)]


def batch(tokens: int) -> dict[str, torch.Tensor]:
    return {"prompt_tokens": torch.zeros(1, tokens, dtype=torch.int64)}


def mean(
    probed: int,
    steps: Sequence[int],
    *,
    policy: Any = None,
    counted: int | None = 30_000,
    recomputed: int = 0,
    reason: str | None = None,
) -> tuple[Flops, Utilisation]:
    """Return the result for a probed step, and measured steps of 1 s, whose prompts have these lengths."""
    probe = ProbeResult(
        collectives={},
        attention_kernel=None,
        attention_sites={},
        checkpointed_modules=0,
        matmul_dtypes={"bfloat16"},
        flops={"model_flops_per_step": counted, "recomputed_flops_per_step": recomputed, "reason": reason},
        memory=None,
        device_name="a device",
        micro_batches=[batch(probed)],
    )
    outlines = [BatchOutline.of(batch(tokens)) for tokens in steps]
    return mean_flops(policy or Formula(), probe, outlines, [1.0] * len(steps), META)


@pytest.fixture(autouse=True)
def _known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICE_PEAKS, "a device", PEAK)


def test_counts_of_the_probed_step_are_scaled_by_the_formula_on_the_device_that_is_given() -> None:
    policy = Formula(fused=True)
    flops, utilisation = mean(10, [5, 15, 40], policy=policy, recomputed=10_000)
    assert flops["model_flops_per_step"] == 60_000
    assert flops["recomputed_flops_per_step"] == 20_000
    assert flops["reason"] is None
    assert utilisation["mfu"] == pytest.approx(45_000 / PEAK), "the median step has 15 tokens"
    assert policy.devices == {"meta"}


def check_unknown(flops: Flops, utilisation: Utilisation, reason: str) -> None:
    assert flops["model_flops_per_step"] is flops["recomputed_flops_per_step"] is None
    assert utilisation["mfu"] is utilisation["hfu"] is None
    assert flops["reason"] == utilisation["mfu_reason"]
    assert reason in str(flops["reason"])


@pytest.mark.parametrize(("probed", "steps"), [(0, [5, 5]), (5, [0, 0]), (5, [0, 5]), (0, [0, 0])])
def test_they_are_unknown_where_the_formula_has_no_flops_of_a_step(probed: int, steps: list[int]) -> None:
    flops, utilisation = mean(probed, steps)
    check_unknown(flops, utilisation, "the policy's formula has no FLOPs of a step")
    towers = flops["per_tower"]
    assert towers is not None
    assert towers["backbone"]["forward"] == 1000 * sum(steps) / len(steps)


@pytest.mark.parametrize("recomputed", [0, 10])
def test_they_are_unknown_where_the_formula_recomputes_nothing_in_the_probed_step_alone(recomputed: int) -> None:
    check_unknown(*mean(1, [1, 9], policy=Formula(fused=True), recomputed=recomputed), "the policy's formula has no FLOPs")


def test_they_are_unknown_for_the_reason_for_which_they_were_not_counted() -> None:
    check_unknown(
        *mean(10, [5, 15], counted=None, reason="compiled code hides its products"), "compiled code hides its products"
    )


def test_nothing_is_recomputed_where_count_and_formula_say_so() -> None:
    flops, utilisation = mean(10, [5, 15])
    assert flops["recomputed_flops_per_step"] == 0
    assert utilisation["hfu"] == utilisation["mfu"]


def test_they_are_unknown_without_a_step() -> None:
    flops, utilisation = mean(10, [])
    check_unknown(flops, utilisation, "no step was measured")
    assert flops["per_tower"] is None
    assert flops["per_tower_reason"] == "no step was measured"
