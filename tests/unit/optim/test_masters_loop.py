"""Masters inside a training loop: accumulation, schedules, hooks, scalers, saving, moving."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn

from benchbox.optim import MasterWeightOptimizer, build_schedule
from benchbox.spec.cell import OptimSpec
from tests.support.masters import all_equal, live_model, master_optimizer, model, set_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def batch(seed: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.fixture
def accumulating() -> Iterator[Accelerator]:
    """An accelerator of one process that steps once in three micro-batches."""
    yield Accelerator(cpu=True, gradient_accumulation_steps=3)
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()


def test_accelerate_steps_it_at_boundaries_only_and_the_schedule_reaches_every_step(accumulating: Accelerator) -> None:
    """Between boundaries neither masters nor gradients are touched; at the boundary the step uses the sum of all gradients and
    the rate that the schedule, built on the same object, has for that step.
    """
    live, alone = live_model(), live_model()
    optimizer, reference = (master_optimizer(network, list(model().parameters()), lr=1.0) for network in (live, alone))
    prepared = accumulating.prepare_optimizer(optimizer)
    spec = OptimSpec(lr=1.0, schedule="warmup_constant", warmup_steps=4)
    schedule = build_schedule(optimizer, spec)
    assert isinstance(prepared, AcceleratedOptimizer)
    assert prepared.optimizer is optimizer
    rates = []
    optimizer.inner.register_step_pre_hook(lambda inner, *_: rates.append(inner.param_groups[0]["lr"]))
    for micro in range(9):
        with accumulating.accumulate(live):
            before = [master.clone() for master in optimizer.masters]
            accumulating.backward(live(batch(micro)).float().square().mean())
            if accumulating.sync_gradients:
                optimizer.clip_grad_norm_(0.1)
            prepared.step()
            if accumulating.sync_gradients:
                schedule.step()
            else:
                assert all_equal(optimizer.masters, before)
            prepared.zero_grad()
            assert (live[0].weight.grad is None) == accumulating.sync_gradients
        (alone(batch(micro)).float().square().mean() / 3).backward()
        if micro % 3 == 2:
            reference.param_groups[0]["lr"] = rates[-1]
            reference.clip_grad_norm_(0.1)
            reference.step()
            reference.zero_grad()
    assert rates == pytest.approx([0.2, 0.4, 0.6])
    assert all_equal(optimizer.masters, reference.masters)


def test_placing_it_on_a_device_changes_no_bit(accumulating: Accelerator) -> None:
    """accelerate saves and loads an optimizer that it places: masters, given before the cast, are not made again."""
    optimizer = master_optimizer(live_model(), list(model().parameters()))
    masters = list(optimizer.masters)
    accumulating.prepare_optimizer(optimizer, device_placement=True)
    assert all_equal(optimizer.masters, model().parameters())
    assert all(after is master for after, master in zip(optimizer.masters, masters, strict=True))


def test_a_closure_is_evaluated_once_with_gradients() -> None:
    """And its loss comes back; the step is that of the gradients it left."""
    live, plain = live_model(), live_model()
    optimizer, reference = (master_optimizer(network, list(model().parameters())) for network in (live, plain))
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = live(batch(0)).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(0.01)
        calls.append(loss.item())
        return loss.item()

    plain(batch(0)).float().square().mean().backward()
    reference.clip_grad_norm_(0.01)
    reference.step()
    assert [optimizer.step(closure)] == calls
    assert all_equal(optimizer.masters, reference.masters)


def test_zeroing_gradients_forgets_the_clip() -> None:
    """A step left out after its clip leaves nothing for the next one."""
    live, unclipped_live = live_model(), live_model()
    clipped, unclipped = (master_optimizer(network, list(model().parameters()), lr=1.0) for network in (live, unclipped_live))
    set_gradients(live, 0)
    clipped.clip_grad_norm_(1e-9)
    clipped.zero_grad()
    assert live[0].weight.grad is None
    for optimizer, network in ((clipped, live), (unclipped, unclipped_live)):
        set_gradients(network, 1)
        optimizer.step()
    states = [[state["exp_avg"] for state in optimizer.state.values()] for optimizer in (clipped, unclipped)]
    assert all_equal(*states)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_is_returned_and_never_hidden(bad: float) -> None:
    """Left out, the step leaves no trace; taken, it is as torch's clip would have it: NaN where the gradient was not finite."""
    live = live_model()
    optimizer = master_optimizer(live, list(model().parameters()))
    set_gradients(live, 0)
    live[2].bias.grad[3] = bad
    norm = optimizer.clip_grad_norm_(1.0)
    assert not torch.isfinite(norm)
    assert all_equal(optimizer.masters, model().parameters())
    optimizer.step()
    assert optimizer.masters[3][3].isnan()
    assert live[2].bias[3].isnan()


def test_a_scaler_for_float16_is_refused() -> None:
    """The error is torch's own: it does not unscale float16 gradients, and no step uses scaled ones."""
    live = model().to(torch.float16)
    optimizer = master_optimizer(live, list(model().parameters()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(live(batch(0).half()).float().mean()).backward()
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.step(optimizer)
    assert all_equal(optimizer.masters, model().parameters())


def test_hooks_on_it_run_once_a_step() -> None:
    """However many buckets there are; those around saving and loading run too."""
    live = live_model()
    optimizer = master_optimizer(live, list(model().parameters()))
    ran: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: ran.append("before step"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda *_: ran.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: saved | {"note": "kept"})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: ran.append(saved.pop("note")))
    optimizer.register_load_state_dict_post_hook(lambda *_: ran.append("loaded"))
    set_gradients(live, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert ran == ["before step", "after step", "before saving", "kept", "loaded"]


def test_parameters_stay_the_objects_they_are() -> None:
    """Through steps and loads: what a model, a schedule or a reducer holds is what is stepped."""
    live = live_model()
    parameters, storages = list(live.parameters()), [weight.data_ptr() for weight in live.parameters()]
    optimizer = master_optimizer(live, list(model().parameters()))
    set_gradients(live, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert [weight.data_ptr() for weight in live.parameters()] == storages
    assert all(master.device == weight.device for weight, master in optimizer.stepped())


def test_a_state_is_loaded_after_a_group_was_added() -> None:
    """Both groups are restored, bit for bit."""

    def two_groups() -> tuple[nn.Sequential, MasterWeightOptimizer]:
        live = live_model()
        optimizer = MasterWeightOptimizer(live[0].parameters(), lr=1e-3, fused=True)
        optimizer.add_param_group({"params": live[2].parameters(), "lr": 1e-2})
        return live, optimizer

    (live, straight), (resumed_live, resumed) = two_groups(), two_groups()
    set_gradients(live, 0)
    straight.step()
    resumed.load_state_dict(straight.state_dict())
    for network, optimizer in ((live, straight), (resumed_live, resumed)):
        set_gradients(network, 1)
        optimizer.step()
    assert all_equal(straight.masters, resumed.masters)
    assert all_equal(live.parameters(), resumed_live.parameters())


@pytest.mark.parametrize(
    ("build_other", "complaint"),
    [
        (lambda: MasterWeightOptimizer(nn.Linear(3, 5).parameters()), "have other sizes"),
        (lambda: MasterWeightOptimizer([*live_model().parameters()][:2] + [nn.Parameter(torch.zeros(3))] * 2), "other shapes"),
    ],
)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_state_of_other_parameters_is_refused(build_other: Callable[[], MasterWeightOptimizer], complaint: str) -> None:
    """Before anything is changed."""
    optimizer = master_optimizer(live_model(), list(model().parameters()))
    with pytest.raises(ValueError, match=complaint):
        optimizer.load_state_dict(build_other().state_dict())
    assert all_equal(optimizer.masters, model().parameters())


def test_it_can_be_pickled() -> None:
    """With its model, as other optimizers: what comes back is linked as it was, and steps alike."""
    live = live_model()
    optimizer = master_optimizer(live, list(model().parameters()))
    set_gradients(live, 0)
    optimizer.step()
    file = io.BytesIO()
    pickle.dump((live, optimizer), file)
    unpickled_live, unpickled = pickle.loads(file.getvalue())
    for network, stepping in ((live, optimizer), (unpickled_live, unpickled)):
        set_gradients(network, 1)
        stepping.step()
    assert all_equal(live.parameters(), unpickled_live.parameters())
    assert all_equal(optimizer.masters, unpickled.masters)


def test_masters_and_state_follow_a_model_to_its_device() -> None:
    """No master remains on the CPU when its parameter leaves it. The meta device stands in for a GPU: it lacks only values."""
    weight = nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([weight], lr=1e-3, foreach=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16, device="meta")))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = [*optimizer.masters, *(state["exp_avg"] for state in optimizer.state.values())]
    assert [tensor.device.type for tensor in tensors] == ["meta", "meta"]
    assert [id(master) for _, master in optimizer.stepped()] == [id(tensor) for tensor in optimizer.state]
    assert optimizer.param_groups[0]["params"][0] is weight
