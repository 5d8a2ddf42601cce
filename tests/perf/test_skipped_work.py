"""Work that a step leaves out, against the same step with it: autograd of a frozen tower, masks, scores without a target."""

from __future__ import annotations

import importlib
import time
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.measure.memory import TensorStorageTracker
from benchbox.optim import freeze
from benchbox.registry.contracts import Axes
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.policies import policy_entry
from tests.support.policy_batches import build, make_batch
from tests.support.ratios import record_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from benchbox.registry.contracts import Batch, Policy

pytestmark = [pytest.mark.perf, pytest.mark.usefixtures("one_thread")]

build("pi05")  # makes `benchbox_policies` importable
AttentionMask = importlib.import_module("benchbox_policies._layers.sequence.attention_mask").AttentionMask
build_pi05 = importlib.import_module("benchbox_policies.pi05.policy").build

CAMERAS = 3
ROUNDS = 9
STEP_ROUNDS = 3  # of them, with a whole forward and backward pass
TOWER_PEAK, TOWER_TIME = 0.5, 0.7
MASK_ROUNDS = 5
SCORE_ROUNDS = 3
VOCABULARY = 257_152  # of PaliGemma


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of this process on the processor, which other processes disturb least."""
    before = time.process_time()
    work()
    return time.process_time() - before


def train_step(policy: Policy, batch: Batch) -> None:
    policy(batch).total.backward()
    policy.zero_grad()


def require_input_gradient(_module: object, inputs: tuple[Tensor]) -> None:
    inputs[0].requires_grad_()


def test_a_frozen_vision_tower_keeps_no_activations_and_has_no_backward(benchmark, capsys) -> None:
    """pi0 small with `freeze: freeze_vision`, against the same frozen tower with autograd through it, which happens as soon as
    its input requires a gradient, and against a trained tower. A round takes the tower and its projector alone, the first
    rounds the whole forward and backward pass as well.
    """
    policies: dict[str, Policy] = {}
    for name in ("frozen", "frozen with autograd", "trained"):
        policies[name] = build("pi0", "small", cams=CAMERAS)
        if name != "trained":
            freeze(policies[name], policies[name].parameter_roles(), FREEZE_PRESETS["freeze_vision"])
    policies["frozen with autograd"].model.vision.patches.register_forward_pre_hook(require_input_gradient)
    batch = make_batch(policies["frozen"].batch_spec(), 1)

    def tower_step(name: str) -> None:
        hidden = policies[name].model.images("images", batch["images"], batch["image_mask"]).hidden
        if hidden.requires_grad:
            hidden.backward(torch.ones_like(hidden))
        policies[name].zero_grad()

    peaks: dict[str, int] = {}
    for name, policy in policies.items():
        with TensorStorageTracker([*policy.parameters(), *policy.buffers(), *batch.values()]) as tracker:
            before = tracker.current_bytes
            tower_step(name)
        peaks[name] = tracker.peak_bytes - before
        train_step(policy, batch)  # the warm-up
    tower_s: dict[str, list[float]] = {name: [] for name in policies}
    step_s: dict[str, list[float]] = {name: [] for name in policies}

    def one_round() -> None:
        for name in policies:
            tower_s[name].append(seconds(lambda name=name: tower_step(name)))
            if len(step_s[name]) < STEP_ROUNDS:
                step_s[name].append(seconds(lambda name=name: train_step(policies[name], batch)))

    benchmark.pedantic(one_round, rounds=ROUNDS)
    towers: dict[str, list[float]] = {}
    for name in ("frozen with autograd", "trained"):
        towers[name] = [ours / other for ours, other in zip(tower_s["frozen"], tower_s[name], strict=True)]
        steps = [ours / other for ours, other in zip(step_s["frozen"], step_s[name], strict=True)]
        memory = peaks["frozen"] / peaks[name]
        suffix = name.replace(" ", "_")
        record_ratio(benchmark, f"tower_peak_over_{suffix}", memory, better="lower", goal=TOWER_PEAK)
        record_ratio(benchmark, f"tower_time_over_{suffix}", towers[name], better="lower", goal=TOWER_TIME)
        record_ratio(benchmark, f"step_time_over_{suffix}", steps, better="lower")
        with capsys.disabled():
            print(
                f"\nfrozen vision tower / {name}: {median(steps):.2f} of forward and backward of pi0 small; the tower alone ",
                end="",
            )
            print(f"{median(towers[name]):.2f} of the time, {memory:.2f} of its peak of {peaks[name] / 2**20:.1f} MiB", end="")
    for name, ratios in towers.items():
        assert peaks["frozen"] < TOWER_PEAK * peaks[name], name
        assert median(ratios) < TOWER_TIME, name


def test_attention_masks_are_built_once_for_a_batch_and_not_in_every_layer(benchmark, capsys, monkeypatch) -> None:
    """Forward passes of pi05 small, in which every mask that is built is counted and timed, against the same passes with layers
    that each build their own.
    """
    policy = build("pi05", "small", cams=CAMERAS)
    batch = make_batch(policy.batch_spec(), 1)
    mask_s: list[float] = []
    build_mask = AttentionMask.build

    def timed_build(*arguments: Any) -> Any:
        before = time.process_time()
        mask = build_mask(*arguments)
        mask_s.append(time.process_time() - before)
        return mask

    class LayerMasks:
        """Masks by window that are built anew whenever a layer takes one."""

        def __init__(self, mask: Any) -> None:
            self.mask = mask

        def __getitem__(self, window: int | None) -> Any:
            return self.mask.build(policy.model.kernel, window)

    monkeypatch.setattr(AttentionMask, "build", timed_build)
    build_masks = policy.model._masks

    def forward(masks: Callable[[Any], Any]) -> tuple[float, float, int]:
        """Return the seconds of a forward pass, those in masks, and the number of masks."""
        mask_s.clear()
        monkeypatch.setattr(policy.model, "_masks", masks)
        with torch.no_grad():
            forward_s = seconds(lambda: policy(batch))
        return forward_s, sum(mask_s), len(mask_s)

    rounds: list[tuple[tuple[float, float, int], tuple[float, float, int]]] = []
    benchmark.pedantic(lambda: rounds.append((forward(build_masks), forward(LayerMasks))), rounds=MASK_ROUNDS, warmup_rounds=1)
    del rounds[0]  # the warm-up
    once, by_layer = rounds[0][0][2], rounds[0][1][2]
    ratios = [ours[1] / other[1] for ours, other in rounds]
    saved = median((other[1] - ours[1]) / ours[0] for ours, other in rounds)
    record_ratio(benchmark, "masks_over_masks_of_layers", once / by_layer, better="lower", goal=1 / len(policy.model.layers))
    record_ratio(benchmark, "mask_time_over_masks_of_layers", ratios, better="lower", goal=0.5)
    with capsys.disabled():
        print(
            f"\nattention masks of pi05 small: {once} built for a batch instead of {by_layer}, in {median(ratios):.2f} of the "
            f"time, which saves {saved:.2%} of a forward pass"
        )
    assert by_layer == once * len(policy.model.layers)
    assert median(ratios) < 0.5


def test_words_are_scored_only_where_there_is_a_target(benchmark, capsys, monkeypatch) -> None:
    """Forward and backward passes of pi05 tiny with the vocabulary of PaliGemma, against the same passes in which the head
    scores all positions of the sequence and the losses of the response are taken from them.
    """
    preset = policy_entry("pi05").presets["tiny"]
    preset = preset | {"model": preset["model"] | {"vocabulary": VOCABULARY}}
    policy = build_pi05(preset, Axes(cams=CAMERAS))
    batch = make_batch(policy.batch_spec(), 1)
    positions: dict[str, tuple[int, int]] = {}
    token_losses = policy.token_losses

    def losses_of_all_positions(name: str, targets: Tensor, sequence: Any, hidden: Tensor) -> Tensor:
        if name != "response":
            return token_losses(name, targets, sequence, hidden)
        indices = sequence.predictor_indices(name)
        positions[name] = indices.shape[1], hidden.shape[1]
        every_target = torch.zeros(hidden.shape[:2], dtype=torch.int64).scatter(1, indices, targets)
        return policy.token_head(name)(policy.model.norm(hidden), targets=every_target).gather(1, indices)

    def loss(losses: Callable[..., Tensor]) -> Tensor:
        monkeypatch.setattr(policy, "token_losses", losses)
        return policy(batch).parts["response"]

    def timed(losses: Callable[..., Tensor]) -> float:
        monkeypatch.setattr(policy, "token_losses", losses)
        return seconds(lambda: train_step(policy, batch))

    batch["response_mask"][:] = True  # else two targets may have one predictor
    torch.testing.assert_close(loss(token_losses), loss(losses_of_all_positions))
    ratios: list[float] = []
    benchmark.pedantic(lambda: ratios.append(timed(token_losses) / timed(losses_of_all_positions)), rounds=SCORE_ROUNDS)
    targets, total = positions["response"]
    record_ratio(benchmark, "time_over_scores_of_all_positions", ratios, better="lower", goal=0.5)
    with capsys.disabled():
        print(f"\nscores of {targets} targets instead of {total} positions, over {VOCABULARY} words: ", end="")
        print(f"{median(ratios):.2f} of the time of forward and backward")
    assert median(ratios) < 0.5
