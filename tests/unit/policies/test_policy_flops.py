"""What a step of a policy costs by formula, held against what torch's counter sees of one."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchbox.measure.flops import FlopCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode, in_backward, is_recomputing
from benchbox.registry.freezing import FREEZES
from benchbox.theory.flops import Cost, total, training_cost
from tests.support.policy_batches import POLICIES, build, make_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.contracts import Batch, Policy, Role

TOLERANCE = 0.01

every = pytest.mark.parametrize("name", POLICIES)
kernels = pytest.mark.parametrize("attention", ["eager", "sdpa"])


class TowerCounter:
    """Counts by tower, each with torch's formulas.

    In forward an operation belongs to the tower of the layer that was called last: attention to that of its values. In backward
    it belongs to where the operation ran whose gradient it forms, which the numbers tell that autograd gives to both.
    """

    def __init__(self, policy: Policy) -> None:
        self.whole, self.forward = (defaultdict(FlopCounter) for _ in range(2))
        self._tower = ""
        self._ran: dict[int, str] = {}
        roles = policy.parameter_roles()
        for name, module in policy.named_modules():
            if f"{name}.weight" in roles:
                module.register_forward_pre_hook(lambda *_, tower=roles[f"{name}.weight"].tower: self._at(tower))

    def _at(self, tower: str) -> None:
        self._tower = tower

    def on_operation(self, *seen: Any) -> None:
        if in_backward() and not is_recomputing():
            self.whole[self._ran.get(torch._C._current_autograd_node()._sequence_nr(), "")].on_operation(*seen)
            return
        self._ran[torch.autograd._get_sequence_nr() - 1] = self._tower
        self.whole[self._tower].on_operation(*seen)
        if not in_backward():
            self.forward[self._tower].on_operation(*seen)

    @property
    def costs(self) -> dict[str, Cost]:
        return {
            tower: Cost(
                forward=(forward := self.forward[tower].total),
                backward=counter.total - counter.recomputed - forward,
                recomputed=counter.recomputed,
            )
            for tower, counter in self.whole.items()
            if counter.total
        }


def torchs_counter() -> FlopCounterMode:
    """It has no formulas of the CPU's fused attention; these are those it has for the CUDA kernels."""
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    return FlopCounterMode(
        display=False,
        custom_mapping={
            getattr(torch.ops.aten, kernel): lambda *shapes, out_shape, **_: sdpa_flop_count(*shapes[:3]),
            getattr(torch.ops.aten, f"{kernel}_backward"): lambda *shapes, out_shape, **_: sdpa_backward_flop_count(
                *shapes[:4]
            ),
        },
    )


def freeze(policy: Policy, freezes: Callable[[Role], bool]) -> None:
    roles = policy.parameter_roles()
    for name, parameter in policy.named_parameters():
        if freezes(roles[name]):
            parameter.requires_grad_(False)


def held_against_what_is_counted(policy: Policy, batch: Batch) -> Cost:
    """The formula's total, after it was found right: in all by torch's counter, and part by part of every tower."""
    costs = training_cost(policy.work(batch))
    with torchs_counter() as counter, OperationDispatchMode(TowerCounter(policy)) as watch:
        policy(batch).total.backward()
    (towers,) = watch._observers
    cost = total(costs)
    assert cost.hardware == pytest.approx(counter.get_total_flops(), rel=TOLERANCE)
    counted = towers.costs
    assert costs.keys() == counted.keys()
    for tower, formula in costs.items():
        for part in ("forward", "backward", "recomputed"):
            assert getattr(formula, part) == pytest.approx(getattr(counted[tower], part), rel=TOLERANCE), (tower, part)
    return cost


@every
@pytest.mark.parametrize("cams", [1, 4])
@pytest.mark.parametrize("checkpointing", [False, True])
@kernels
def test_the_formula_says_what_a_step_costs_whatever_trains(name, cams, checkpointing, attention):
    """Every tower's forward, backward and recomputation: with everything trained, vision frozen, the expert alone trained."""
    models = set()
    for preset in FREEZES.values():
        policy = build(name, cams=cams, checkpointing=checkpointing, attention=attention)
        if preset.about in (None, *(role.tower for role in policy.parameter_roles().values())):
            freeze(policy, preset.freezes)
            models.add(held_against_what_is_counted(policy, make_batch(policy.batch_spec(), 2)).model)
    assert len(models) > 1  # what is frozen costs less


@every
@kernels
def test_it_is_right_where_layers_are_frozen_here_and_there(name, attention):
    """The lower half of every tower; or every matrix, so that only norms, biases and tables train."""

    def low(policy: Policy) -> None:
        for module in policy.modules():
            if isinstance(module, torch.nn.ModuleList):
                module[: len(module) // 2].requires_grad_(False)

    def matrices(policy: Policy) -> None:
        freeze(policy, lambda role: role.decay)

    for frozen in (low, matrices):
        policy = build(name, checkpointing=True, attention=attention)
        frozen(policy)
        held_against_what_is_counted(policy, make_batch(policy.batch_spec(), 2))


@pytest.mark.parametrize("name", ["pi05", "pi07_low_level", "pi07_high_level"])
def test_a_block_that_no_sample_has_costs_nothing(name):
    policy = build(name)
    batch = make_batch(policy.batch_spec(), 2)
    costs = []
    for there in (True, False):
        for mask in policy.optional.values():
            batch[mask][:] = there
        policy.eval()  # nothing is dropped by chance
        costs.append(held_against_what_is_counted(policy, batch).model)
    assert costs[1] < costs[0]


@kernels
def test_only_through_keys_that_are_not_insulated_a_frozen_expert_passes_a_gradient_on(attention):
    costs = {}
    for insulated in (True, False):
        policy = build("pi05", attention=attention)
        for unit in policy.model.layers:
            unit.insulated = insulated
        freeze(policy, lambda role: role.tower in ("expert", "head"))
        costs[insulated] = held_against_what_is_counted(policy, make_batch(policy.batch_spec(), 2)).model
    assert costs[True] < costs[False]


@pytest.mark.parametrize("name", ["pi05", "pi07_low_level"])
def test_it_is_right_of_full_without_a_weight_in_memory(name):
    with torch.device("meta"):
        policy = build(name, "full", attention="eager", cams=2)
    batch = {key: value.to("meta") for key, value in make_batch(policy.batch_spec(), 1).items()}
    costs = training_cost(policy.work(batch))
    with FlopCounterMode(display=False) as counter:
        policy(batch).total.backward()
    assert total(costs).hardware == pytest.approx(counter.get_total_flops(), rel=TOLERANCE)


def test_a_token_of_the_backbone_costs_two_flops_a_parameter_and_its_attention():
    """pi0's Gemma-2B at one camera, by hand: 18 layers, of the last only keys and values; 256 patches and 48 tokens."""
    with torch.device("meta"):
        policy = build("pi0", "full")
    batch = {key: value.to("meta") for key, value in make_batch(policy.batch_spec(), 1).items()}
    tokens, width, mlp, heads, head = 256 + 48, 2048, 16384, 8, 256
    matrices = 2 * width * heads * head + 2 * width * head + 3 * width * mlp
    layer = 2 * tokens * matrices + 2 * 2 * heads * tokens * tokens * head
    assert training_cost(policy.work(batch))["backbone"].forward == 17 * layer + 2 * tokens * 2 * width * head
