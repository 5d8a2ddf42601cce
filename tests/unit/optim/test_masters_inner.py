"""Whatever optimizer steps the masters, it computes what it would compute on float32 weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchbox.measure.memory import TensorStorageTracker
from benchbox.optim import MasterWeightOptimizer, chunks, clip_coefficient
from tests.support.masters import all_equal, live_model, master_optimizer, model, set_gradients, upcast_gradients

OPTIMIZERS = [
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    (torch.optim.AdamW, {"lr": 1e-3, "fused": True, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    (torch.optim.AdamW, {"lr": 1e-3, "foreach": False}),
    (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "fused": True}),
    (torch.optim.Adam, {"lr": 1e-3, "fused": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 1e-2}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True}),
    (torch.optim.NAdam, {"lr": 1e-3}),
    (torch.optim.RAdam, {"lr": 1e-3}),
    (torch.optim.Adamax, {"lr": 1e-3}),
    (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.ASGD, {"lr": 1e-2}),
    (torch.optim.Rprop, {"lr": 1e-2}),
    (torch.optim.Adafactor, {"lr": 1e-2}),
]


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step in many buckets and, if the optimizer permits it, in several chunks per tensor.

    Their size is a whole number of vectors, as in real use: some kernels (fused SGD) round the remainder of a tensor
    differently.
    """
    monkeypatch.setitem(chunks.BUCKET_ELEMENTS, "cpu", 64)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize(("inner", "arguments"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_torch_optimizer_steps_masters_as_float32_weights(inner: type[torch.optim.Optimizer], arguments: Any) -> None:
    """To the last bit, and saved to a file, loaded into a fresh optimizer before its first step, as if nothing had happened."""
    full, live = model(), live_model()
    optimizer = MasterWeightOptimizer(live.parameters(), inner, masters=list(model().parameters()), **arguments)
    reference = inner(full.parameters(), **arguments)
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = MasterWeightOptimizer(live.parameters(), inner, **arguments)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
        set_gradients(live, step)
        upcast_gradients(full, live)
        optimizer.step()
        reference.step()
    assert all_equal(optimizer.masters, full.parameters())
    assert all_equal(live.parameters(), (weight.to(torch.bfloat16) for weight in full.parameters()))
    assert not all_equal(full.parameters(), model().parameters())


def test_matrices_may_be_orthogonalised() -> None:
    """Muon needs complete matrices, and gets them."""
    live, full = (nn.Linear(12, 20, bias=False) for _ in range(2))
    full.load_state_dict(live.state_dict())
    masters = [live.weight.detach().clone()]
    optimizer = MasterWeightOptimizer(live.to(torch.bfloat16).parameters(), torch.optim.Muon, masters=masters, lr=0.1)
    reference = torch.optim.Muon(full.parameters(), lr=0.1)
    set_gradients(live, 0)
    upcast_gradients(full, live)
    optimizer.step()
    reference.step()
    assert all_equal(optimizer.masters, full.parameters())


@pytest.mark.usefixtures("small_buckets")
def test_groups_keep_their_own_options() -> None:
    """Learning rate and weight decay of each group, also when another than the first comes after steps, with its masters."""
    full, live = model(), live_model()
    masters = list(model().parameters())
    live_group, full_group = (
        {"params": list(network[0].parameters()), "lr": 1e-2, "weight_decay": 0.0} for network in (live, full)
    )
    optimizer = MasterWeightOptimizer(
        [live_group], torch.optim.AdamW, masters=masters[:2], lr=1e-3, weight_decay=0.5, fused=True
    )
    reference = torch.optim.AdamW([full_group], lr=1e-3, weight_decay=0.5, fused=True)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": live[2].parameters(), "masters": masters[2:]})
            reference.add_param_group({"params": full[2].parameters()})
        set_gradients(live, step)
        upcast_gradients(full, live)
        optimizer.step()
        reference.step()
    assert all_equal(optimizer.masters, full.parameters())
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1e-2, 0.0), (1e-3, 0.5)]
    assert "masters" not in optimizer.param_groups[1]


def test_a_group_without_masters_gets_them_from_its_parameters() -> None:
    optimizer = master_optimizer(live := live_model(), None)
    optimizer.add_param_group({"params": (added := live_model(seed=1)).parameters()})
    assert all_equal(optimizer.masters, (weight.float() for network in (live, added) for weight in network.parameters()))


def test_a_group_that_is_refused_leaves_everything_as_it_was() -> None:
    """And the optimizer still steps."""
    optimizer = master_optimizer(live := live_model(), None)
    with pytest.raises(ValueError, match="1 masters for 4 parameters"):
        optimizer.add_param_group({"params": live_model(seed=1).parameters(), "masters": [torch.zeros(1)]})
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1
    set_gradients(live, 0)
    optimizer.step()


@pytest.mark.usefixtures("small_buckets")
def test_loading_rounds_the_masters_into_the_live_parameters() -> None:
    """Although these had other weights, as of a model whose own state was not loaded."""
    saved, live = master_optimizer(live_model(seed=1), list(model(seed=1).parameters())), live_model()
    optimizer = master_optimizer(live, None)
    optimizer.load_state_dict(saved.state_dict())
    assert all_equal(optimizer.masters, model(seed=1).parameters())
    assert all_equal(live.parameters(), live_model(seed=1).parameters())


class Together(torch.optim.Optimizer):
    """Divides by the norm over all its tensors, and counts its calls in its groups, as optimizers outside torch may."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for group in self.param_groups for p in group["params"]])
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / norm, alpha=group["lr"] / group["calls"])


class WithoutClosure(Together):
    """Takes no closure at all."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("inner", [Together, WithoutClosure])
def test_an_unknown_optimizer_sees_everything_at_once(inner: type[Together]) -> None:
    """Called bucket by bucket, it would compute something else without a word."""
    full, live = model(), live_model()

    def groups(of: nn.Sequential) -> list[dict[str, Any]]:
        return [{"params": list(of[0].parameters())}, {"params": list(of[2].parameters()), "lr": 0.3}]

    optimizer = MasterWeightOptimizer(groups(live), inner, masters=list(model().parameters()), lr=0.1)
    reference = inner(groups(full), lr=0.1)
    optimizer.step()  # nothing to step yet: not a call
    for step in range(3):
        set_gradients(live, step)
        upcast_gradients(full, live)
        optimizer.step()
        reference.step()
    assert all_equal(optimizer.masters, full.parameters())
    assert [group["calls"] for group in optimizer.param_groups] == [3, 3]


def test_live_parameters_may_be_of_several_dtypes() -> None:
    """bfloat16, float16 and float32 side by side: masters do not depend on it, and a float32 parameter is its master."""
    full, live = model(), model()
    live[0].weight.data = live[0].weight.data.to(torch.bfloat16)
    live[0].bias.data = live[0].bias.data.to(torch.float16)
    optimizer = master_optimizer(live, list(model().parameters()))
    reference = torch.optim.AdamW(full.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        set_gradients(live, step)
        upcast_gradients(full, live)
        optimizer.step()
        reference.step()
    assert all_equal(optimizer.masters, full.parameters())
    assert [weight.dtype for weight in live.parameters()] == [torch.bfloat16, torch.float16, torch.float32, torch.float32]
    assert all_equal(live[2].parameters(), optimizer.masters[2:])


def test_frozen_parameters_stay_as_they_are() -> None:
    live = live_model()
    live[0].requires_grad_(requires_grad=False)
    optimizer = master_optimizer(live, list(model().parameters()))
    live(torch.ones(2, 24, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert all_equal(optimizer.masters[:2], list(model().parameters())[:2])
    assert not any(torch.equal(*pair) for pair in zip(optimizer.masters[2:], list(model().parameters())[2:], strict=True))
    assert len(optimizer.state) == 2


@pytest.mark.usefixtures("small_buckets")
def test_watching_the_step_changes_no_bit_and_shows_the_clipped_gradients() -> None:
    """Without hooks the fused kernel is called directly; with a hook, the optimizer's own step."""
    ends = []
    for watched in (False, True):
        live = live_model()
        optimizer = master_optimizer(live, list(model().parameters()))
        hook_gradients: list[Tensor] = []
        for step in range(4):
            set_gradients(live, step)
            wanted = [weight.grad.float().flatten() for weight in live.parameters()]
            wanted = [gradient / (1 / clip_coefficient(optimizer.clip_grad_norm_(0.1), 0.1)) for gradient in wanted]
            hook_gradients.clear()

            def note(stepping: torch.optim.Optimizer, *_: Any, hook_gradients: list[Tensor] = hook_gradients) -> None:
                if isinstance(stepping, torch.optim.AdamW):
                    hook_gradients += [p.grad.flatten().clone() for group in stepping.param_groups for p in group["params"]]

            handle = register_optimizer_step_pre_hook(note) if watched else None
            optimizer.step()
            if handle is not None:
                handle.remove()
                assert torch.equal(torch.cat(hook_gradients), torch.cat(wanted))
        ends.append([*optimizer.masters, *(value for state in optimizer.state.values() for value in state.values())])
    assert all_equal(*ends)


@pytest.mark.usefixtures("small_buckets")
def test_a_hook_sees_every_part_of_every_tensor_once() -> None:
    """The inner optimizer has the tensors that `stepped` declares in its hooks, once per step, in order."""
    optimizer = master_optimizer(live := live_model(), None)
    hook_ids: list[int] = []
    optimizer.inner.register_step_post_hook(lambda inner, *_: hook_ids.extend(id(p) for p in inner.param_groups[0]["params"]))
    for step in range(2):
        set_gradients(live, step)
        optimizer.step()
    assert hook_ids == 2 * [id(master) for _, master in optimizer.stepped()]
    assert len(hook_ids) > 2 * len(optimizer.masters)


@pytest.mark.parametrize("inner", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_takes_little_memory_beside_masters_and_state(inner: type[torch.optim.Optimizer]) -> None:
    """At most 64 MiB, where float32 gradients would take 80, however large a single tensor is."""
    live = nn.Parameter(torch.zeros(20 * 2**20, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([live], inner, lr=1e-3, foreach=True)
    live.grad = torch.full_like(live, 0.1)
    with TensorStorageTracker([live, live.grad, *optimizer.masters]) as tracker:
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        state = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
        expected_bytes = live.nbytes + live.grad.nbytes + optimizer.masters[0].nbytes + state
        assert tracker.peak_bytes - expected_bytes <= 64 * 2**20


def test_what_cannot_be_done_right_is_refused() -> None:
    """A closure called within the step, sparse gradients, dtypes that float32 does not hold: one line each, and why."""
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="LBFGS evaluates its closure within the step"):
        MasterWeightOptimizer([weight], torch.optim.LBFGS)
    with pytest.raises(TypeError, match=r"no float32 master for a parameter of torch\.float64"):
        MasterWeightOptimizer([nn.Parameter(torch.zeros(3, dtype=torch.float64))])
    embedding = nn.Embedding(5, 3, sparse=True, dtype=torch.bfloat16)
    optimizer = MasterWeightOptimizer(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="dense gradients only"):
        optimizer.step()


def test_sharded_parameters_are_refused(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        weight = nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,))))
        with pytest.raises(TypeError, match="sharded parameter"):
            MasterWeightOptimizer([weight])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("small_buckets")
def test_copies_go_their_own_way() -> None:
    """A deep copy of a model with its optimizer steps as the original, without touching it."""
    live = live_model()
    optimizer = master_optimizer(live, list(model().parameters()))
    set_gradients(live, 0)
    optimizer.step()
    after_one = [master.clone() for master in optimizer.masters]
    live_copy, copied = copy.deepcopy((live, optimizer))
    set_gradients(live_copy, 1)
    copied.step()
    assert all_equal(optimizer.masters, after_one)
    set_gradients(live, 1)
    optimizer.step()
    assert all_equal(optimizer.masters, copied.masters)
    assert all_equal(live.parameters(), live_copy.parameters())
