"""Masters keep what bfloat16 cannot, through steps, schedules and resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchbox.optim import MasterWeightOptimizer, build_schedule, chunks, clip_coefficient
from benchbox.spec.cell import OptimSpec
from tests.support.masters import live_model, master_optimizer, model, set_gradients, upcast_gradients


def test_masters_step_as_float32_weights_would() -> None:
    """Given the same gradients, masters follow AdamW on float32 weights bit for bit, and live weights are them, rounded."""
    full, live = model(), live_model()
    optimizer = master_optimizer(live, list(model().parameters()))
    reference = torch.optim.AdamW(full.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(20):
        set_gradients(live, step)
        upcast_gradients(full, live)
        optimizer.step()
        reference.step()
    for master, wanted, rounded in zip(optimizer.masters, full.parameters(), live.parameters(), strict=True):
        assert torch.equal(master, wanted)
        assert torch.equal(rounded, master.to(torch.bfloat16))


def test_masters_come_from_the_weights_before_the_cast() -> None:
    """Digits lost in the cast are in masters that are passed, and missing in masters derived from the live weights."""
    with_masters = master_optimizer(live_model(), list(model().parameters()))
    without_masters = master_optimizer(live_model(), None)
    assert all(torch.equal(master, weight) for master, weight in zip(with_masters.masters, model().parameters(), strict=True))
    assert not any(
        torch.equal(master, weight) for master, weight in zip(without_masters.masters, model().parameters(), strict=True)
    )


def test_state_is_float32_and_updates_below_rounding_arrive() -> None:
    """A thousand updates too small for bfloat16 move the live weight; stepping the live weight itself leaves it there."""
    steps, lr = 1000, 1e-5
    moved, stuck = (nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2))
    with_masters = MasterWeightOptimizer([moved], torch.optim.AdamW, lr=lr, weight_decay=0.0)
    without = torch.optim.AdamW([stuck], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        moved.grad, stuck.grad = torch.ones_like(moved), torch.ones_like(stuck)
        with_masters.step()
        without.step()
    assert {value.dtype for state in with_masters.state.values() for value in state.values()} == {torch.float32}
    assert moved[0].item() == pytest.approx(1 - steps * lr, rel=2**-8)
    assert stuck[0].item() == 1.0


def test_clipping_acts_after_the_upcast() -> None:
    """The norm returned is the float32 norm of the gradients, and the step is that of float32 gradients scaled exactly once."""
    live, full = live_model(), model()
    optimizer = master_optimizer(live, list(model().parameters()))
    reference = torch.optim.AdamW(full.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        set_gradients(live, step)
        before = [parameter.grad.clone() for parameter in live.parameters()]
        upcast_gradients(full, live)
        wanted = torch.nn.utils.get_total_norm([parameter.grad for parameter in full.parameters()])
        norm = optimizer.clip_grad_norm_(0.5)
        assert norm.dtype == torch.float32
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-6)
        for parameter in full.parameters():
            parameter.grad /= 1 / clip_coefficient(norm, 0.5)
        optimizer.step()
        reference.step()
        assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in zip(live.parameters(), before, strict=True))
    assert all(torch.equal(master, weight) for master, weight in zip(optimizer.masters, full.parameters(), strict=True))
    state = [optimizer.state[master]["exp_avg"] for master in optimizer.masters]
    assert torch.linalg.vector_norm(torch.cat([moment.flatten() for moment in state])) < 0.5


def test_a_clip_lasts_for_one_step() -> None:
    """A step without a clip before it takes the gradients as they are, whatever was clipped before."""
    live, unclipped_live = live_model(), live_model()
    clipped, unclipped = (master_optimizer(network, list(model().parameters()), lr=0.0) for network in (live, unclipped_live))
    set_gradients(live, 0)
    clipped.clip_grad_norm_(1e-3)
    clipped.step()
    for optimizer, network in ((clipped, live), (unclipped, unclipped_live)):
        optimizer.state.clear()
        set_gradients(network, 1)
        optimizer.step()
    for state, wanted in zip(clipped.state.values(), unclipped.state.values(), strict=True):
        assert torch.equal(state["exp_avg"], wanted["exp_avg"])


def test_resuming_is_bit_exact() -> None:
    """Saved and loaded in the middle, an optimizer ends with the masters, moments and live weights of one that went through."""
    straight_live, interrupted_live = (live_model() for _ in range(2))
    straight = master_optimizer(straight_live, list(model().parameters()))
    interrupted = master_optimizer(interrupted_live, list(model().parameters()))
    for step in range(3):
        for live, optimizer in ((straight_live, straight), (interrupted_live, interrupted)):
            set_gradients(live, step)
            optimizer.step()
    saved = copy.deepcopy(interrupted.state_dict())
    resumed_live = live_model(seed=9)
    resumed = master_optimizer(resumed_live, None)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        for live, optimizer in ((straight_live, straight), (resumed_live, resumed)):
            set_gradients(live, step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(straight.masters, resumed.masters, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(straight_live.parameters(), resumed_live.parameters(), strict=True))
    for a, b in zip(straight.state.values(), resumed.state.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_what_is_saved_in_one_chunk_is_resumed_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved state is per parameter, so a device with chunks of another size continues bit for bit."""
    ends = []
    for elements in (10**9, 7):
        monkeypatch.setitem(chunks.BUCKET_ELEMENTS, "cpu", 10**9)
        live = live_model()
        optimizer = master_optimizer(live, list(model().parameters()))
        set_gradients(live, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        monkeypatch.setitem(chunks.BUCKET_ELEMENTS, "cpu", elements)
        resumed = master_optimizer(live, None)
        resumed.load_state_dict(saved)
        again = resumed.state_dict()
        assert [value.shape for value in again["masters"]] == [parameter.shape for parameter in live.parameters()]
        assert again["state"].keys() == saved["state"].keys()
        for index, state in saved["state"].items():
            assert all(torch.equal(state[name], again["state"][index][name]) for name in state)
        set_gradients(live, 1)
        resumed.step()
        ends.append(resumed.masters)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_state_without_masters_is_refused() -> None:
    """Loading what another optimizer saved would silently derive masters from bfloat16."""
    live = live_model()
    with pytest.raises(KeyError, match="holds no masters"):
        master_optimizer(live, None).load_state_dict(torch.optim.AdamW(live.parameters()).state_dict())


def test_the_schedule_reaches_the_step() -> None:
    """A schedule built on it decides the rate the inner optimizer steps with: at step k, the schedule's value at k."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([parameter], torch.optim.SGD, lr=1.0)
    schedule = build_schedule(optimizer, OptimSpec(lr=1.0, schedule="warmup_constant", warmup_steps=3))
    changes = []
    for _ in range(5):
        parameter.grad = torch.ones_like(parameter)
        before = optimizer.masters[0].clone()
        optimizer.step()
        schedule.step()
        changes.append((before - optimizer.masters[0]).item())
    assert changes == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_buckets_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is the same to the last bit in chunks of tensors, a few tensors at a time, or all at once."""
    results = []
    for elements in (7, 50, 10**9):
        monkeypatch.setitem(chunks.BUCKET_ELEMENTS, "cpu", elements)
        live = live_model()
        optimizer = master_optimizer(live, list(model().parameters()))
        for step in range(3):
            set_gradients(live, step)
            optimizer.step()
        results.append(optimizer.masters)
    for small, medium, large in zip(*results, strict=True):
        assert torch.equal(small, large)
        assert torch.equal(medium, large)


def test_an_optimizer_that_needs_complete_tensors_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adafactor's factored state is that of the whole matrix, however small the buckets are."""
    monkeypatch.setitem(chunks.BUCKET_ELEMENTS, "cpu", 7)
    live, full = live_model(), model()
    optimizer = MasterWeightOptimizer(live.parameters(), torch.optim.Adafactor, masters=list(model().parameters()), lr=1e-2)
    reference = torch.optim.Adafactor(full.parameters(), lr=1e-2)
    for step in range(3):
        set_gradients(live, step)
        upcast_gradients(full, live)
        optimizer.step()
        reference.step()
    assert all(torch.equal(master, weight) for master, weight in zip(optimizer.masters, full.parameters(), strict=True))


def test_live_parameters_may_move_to_another_storage() -> None:
    """`.data` replaced after construction, as `.to(device)` does: the step reaches the storage the model computes with."""
    live = live_model()
    optimizer = master_optimizer(live, list(model().parameters()))
    for parameter in live.parameters():
        parameter.data = parameter.data.clone()
    set_gradients(live, 0)
    optimizer.step()
    for master, parameter in zip(optimizer.masters, live.parameters(), strict=True):
        assert torch.equal(parameter, master.to(torch.bfloat16))


def test_a_parameter_without_gradient_stays() -> None:
    """Neither updated nor decayed, as with any torch optimizer."""
    live = live_model()
    optimizer = master_optimizer(live, list(model().parameters()))
    set_gradients(live, 0)
    idle = next(live.parameters())
    idle.grad = None
    before = optimizer.masters[0].clone()
    optimizer.step()
    assert torch.equal(optimizer.masters[0], before)
    assert not torch.equal(optimizer.masters[1], list(model().parameters())[1])
