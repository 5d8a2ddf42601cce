"""FLOPs of a step by formula, compared with torch's counter."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from benchbox.measure.flops import FlopCounter
from benchbox.observer.hooks.dispatch import OperationDispatchMode, in_backward, is_recomputing
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.theory.flops import Cost, total_cost, training_cost
from tests.support.policy_batches import POLICIES, build, build_on_meta, make_batch
from tests.support.tiers import in_tiers

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.registry.contracts import Batch, Policy, Role

TOLERANCE = 0.01

every = pytest.mark.parametrize("name", POLICIES)
kernels = pytest.mark.parametrize("attention", ["eager", "sdpa"])


class TowerCounter:
    """Counts of each tower by torch's formulas.

    A forward operation belongs to the tower of the layer that was called last, and attention to the tower of its values. A
    backward operation belongs to the tower of its forward operation, which has the same autograd sequence number.
    """

    def __init__(self, policy: Policy) -> None:
        self.total, self.forward = (defaultdict(FlopCounter) for _ in range(2))
        self._tower = ""
        self._towers_by_sequence: dict[int, str] = {}
        roles = policy.parameter_roles()
        self._handles = [
            module.register_forward_pre_hook(lambda *_, tower=roles[f"{name}.weight"].tower: self._enter(tower))
            for name, module in policy.named_modules()
            if f"{name}.weight" in roles
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, tower: str) -> None:
        self._tower = tower

    is_relevant = staticmethod(FlopCounter.is_relevant)

    def on_operation(self, *arguments: Any) -> None:
        node = torch._C._current_autograd_node() if in_backward() else None
        # Activation checkpointing calls the modules again, and the cross-entropy of a head recomputes without its module.
        if node is not None and (not is_recomputing() or "HeadCrossEntropy" in node.name()):
            sequence = node._sequence_nr()
            self.total[self._towers_by_sequence.get(sequence, "")].on_operation(*arguments)
            return
        self._towers_by_sequence[torch.autograd._get_sequence_nr() - 1] = self._tower
        self.total[self._tower].on_operation(*arguments)
        if not in_backward():
            self.forward[self._tower].on_operation(*arguments)

    @property
    def costs(self) -> dict[str, Cost]:
        return {
            tower: Cost(
                forward=(forward := self.forward[tower].total),
                backward=counter.total - counter.recomputed - forward,
                recomputed=counter.recomputed,
            )
            for tower, counter in self.total.items()
            if counter.total
        }


class TorchCounter(FlopCounterMode):
    """Torch's counter, with its formulas for CUDA attention kernels also for the CPU kernel, for which it has none.

    It passes each operation on to the counter of towers: two dispatch modes would take twice as long.
    """

    def __init__(self, towers: TowerCounter) -> None:
        kernel = "_scaled_dot_product_flash_attention_for_cpu"
        super().__init__(
            display=False,
            custom_mapping={
                getattr(torch.ops.aten, kernel): lambda *shapes, out_shape, **_: sdpa_flop_count(*shapes[:3]),
                getattr(torch.ops.aten, f"{kernel}_backward"): lambda *shapes, out_shape, **_: sdpa_backward_flop_count(
                    *shapes[:4]
                ),
            },
        )
        self._towers = towers

    def _count_flops(self, operation: Any, result: Any, args: Any, kwargs: Any) -> Any:
        self._towers.on_operation(operation, args, kwargs, result)
        return super()._count_flops(operation, result, args, kwargs)


def freeze(policy: Policy, freezes: Callable[[Role], bool]) -> None:
    roles = policy.parameter_roles()
    for name, parameter in policy.named_parameters():
        if freezes(roles[name]):
            parameter.requires_grad_(False)


def check_cost(policy: Policy, batch: Batch, *, by_torch: bool = True) -> Cost:
    """Compare the formula with the counts of torch's formulas for each part of every tower, and return its total.

    With `by_torch` torch's own counter counts as well, which takes most of the time, and agrees with both.
    """
    costs = training_cost(policy.work(batch))
    towers = TowerCounter(policy)
    counter = TorchCounter(towers) if by_torch else OperationDispatchMode(towers)
    with counter:
        policy(batch).total.backward()
    towers.remove()
    cost = total_cost(costs)
    counted = towers.costs
    total = sum(tower.hardware for tower in counted.values())
    assert cost.hardware == pytest.approx(total, rel=TOLERANCE)
    if isinstance(counter, TorchCounter):
        assert total == counter.get_total_flops()
    assert costs.keys() == counted.keys()
    for tower, formula in costs.items():
        for part in ("forward", "backward", "recomputed"):
            assert getattr(formula, part) == pytest.approx(getattr(counted[tower], part), rel=TOLERANCE), (tower, part)
    return cost


# Every two of cameras, checkpointing and attention occur in all combinations.
SETUPS = [(1, False, "eager"), (4, True, "eager"), (4, False, "sdpa"), (1, True, "sdpa")]


@pytest.mark.parametrize(
    ("name", "cams", "checkpointing", "attention"),
    # By default one setup of each policy, of the first three: the test of partly frozen towers has every policy in the last.
    in_tiers(
        ((name, *setup) for name in POLICIES for setup in SETUPS),
        lambda case: case[1:] == SETUPS[(0, 1, 2, 1)[POLICIES.index(case[0]) % 4]],
    ),
)
def test_the_formula_gives_the_flops_of_a_step_whatever_is_trained(name, cams, checkpointing, attention):
    """Forward, backward and recomputation agree in every tower, under every freezing preset."""
    models = set()
    policy = build(name, cams=cams, checkpointing=checkpointing, attention=attention)
    towers = {role.tower for role in policy.parameter_roles().values()}
    trainable = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    batch = make_batch(policy.batch_spec(), 2)
    for index, preset in enumerate(FREEZE_PRESETS.values()):
        if preset.requires_tower in (None, *towers):
            for parameter in trainable:
                parameter.requires_grad_(True)
            freeze(policy, preset.freezes)
            models.add(check_cost(policy, batch, by_torch=index == 0).model)
    # Freezing reduces the cost, except of a policy that always freezes the same towers.
    assert (len(models) > 1) == (name != "cosmos_droid")


@every
@pytest.mark.parametrize("attention", in_tiers(["eager", "sdpa"], "sdpa".__eq__))
def test_the_formula_holds_for_partly_frozen_towers(name, attention):
    """Frozen are the lower half of every tower, or all matrices, so that only norms, biases and embeddings train."""

    def lower_half(policy: Policy) -> None:
        for module in policy.modules():
            if isinstance(module, torch.nn.ModuleList):
                module[: len(module) // 2].requires_grad_(False)

    def matrices(policy: Policy) -> None:
        freeze(policy, lambda role: role.decay)

    for freeze_part in (lower_half, matrices):
        policy = build(name, checkpointing=True, attention=attention)
        freeze_part(policy)
        check_cost(policy, make_batch(policy.batch_spec(), 2), by_torch=freeze_part is lower_half)


@pytest.mark.parametrize("name", ["pi05", "pi07_low_level", "pi07_high_level"])
def test_a_block_that_is_absent_from_all_samples_costs_nothing(name):
    policy = build(name)
    batch = make_batch(policy.batch_spec(), 2)
    costs = []
    for present in (True, False):
        for mask in policy.optional.values():
            batch[mask][:] = present
        policy.eval()  # no random drops
        costs.append(check_cost(policy, batch).model)
    assert costs[1] < costs[0]


@kernels
def test_a_frozen_expert_has_backward_flops_only_without_insulation(attention):
    costs = {}
    for insulated in (True, False):
        policy = build("pi05", attention=attention)
        for unit in policy.model.layers:
            unit.insulated = insulated
        freeze(policy, lambda role: role.tower in ("expert", "head"))
        costs[insulated] = check_cost(policy, make_batch(policy.batch_spec(), 2)).model
    assert costs[True] < costs[False]


@pytest.mark.parametrize("name", in_tiers(["pi05", "pi07_low_level"], "pi05".__eq__))
def test_the_formula_holds_for_full_on_the_meta_device(name):
    policy = build_on_meta(name, "full", attention="eager", cams=2)
    batch = {key: value.to("meta") for key, value in make_batch(policy.batch_spec(), 1).items()}
    costs = training_cost(policy.work(batch))
    with FlopCounterMode(display=False) as counter:
        policy(batch).total.backward()
    assert total_cost(costs).hardware == pytest.approx(counter.get_total_flops(), rel=TOLERANCE)


def test_a_token_of_the_backbone_costs_two_flops_a_parameter_and_its_attention():
    """pi0's Gemma-2B at one camera, by hand: 18 layers, with only keys and values in the last; 256 patches and 48 tokens."""
    policy = build_on_meta("pi0", "full")
    batch = {key: value.to("meta") for key, value in make_batch(policy.batch_spec(), 1).items()}
    tokens, width, mlp, heads, head = 256 + 48, 2048, 16384, 8, 256
    matrices = 2 * width * heads * head + 2 * width * head + 3 * width * mlp
    layer = 2 * tokens * matrices + 2 * 2 * heads * tokens * tokens * head
    assert training_cost(policy.work(batch))["backbone"].forward == 17 * layer + 2 * tokens * 2 * width * head
