"""Parts of a step that all backends share."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from benchbox.backends import base, replicated
from benchbox.backends.replicated import Ddp, Single
from benchbox.errors import UnsupportedError
from benchbox.registry.backends import BUILT_IN_BACKENDS
from benchbox.registry.contracts import Role
from benchbox.registry.recipes import recipe_by_name
from benchbox.spec.cell import OptimSpec

if TYPE_CHECKING:
    from benchbox.backends.base import Backend


@pytest.mark.parametrize(("norm", "judged"), [(2.5, 2.5), (math.nan, math.inf), (math.inf, math.inf), (-1.0, math.inf)])
def test_a_norm_that_is_not_finite_is_judged_as_infinite(norm: float, judged: float) -> None:
    """No comparison with NaN is true, so that a guard against spikes would let it pass; -1 is DeepSpeed's number for it."""
    backend = Single()
    backend.grad_norm = torch.tensor(norm)
    assert backend.norm_of_step() == judged


def test_a_mean_over_ranks_is_their_sum_over_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: 4, all_reduce=lambda value: value.add_(9))
    monkeypatch.setattr(base, "dist", ranks)
    assert Single().mean_over_ranks(torch.tensor(3.0)).item() == 3


@pytest.mark.parametrize(("backend", "skips"), [(Single(), True), (Ddp(), False)])
def test_a_backward_pass_skips_work_where_gradients_of_frozen_parameters_are_not_computed(
    backend: Backend, skips: bool
) -> None:
    assert not backend.skips_frozen_work
    backend._frozen = [nn.Parameter(torch.ones(1))]
    assert backend.skips_frozen_work is skips


@pytest.mark.parametrize("backend", sorted(BUILT_IN_BACKENDS))
def test_scalar_parameters_are_refused_by_the_backends_that_shard_and_complex_ones_by_all(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch and DeepSpeed fail on scalars that are sharded; a cast drops the imaginary parts of complex numbers."""
    prepared = BUILT_IN_BACKENDS[backend].load()()
    monkeypatch.setattr(prepared, "_prepare", lambda policy, *_: policy)
    policy: Any = ParameterPolicy(gain=torch.tensor(0.5))
    shape = base.StepShape(batch=1, accumulation=1, max_grad_norm=1.0)
    shards = backend not in ("single", "ddp")
    with pytest.raises(UnsupportedError, match=f"{backend} cannot shard .* as gain: ") if shards else nullcontext():
        prepared.prepare(policy, recipe_by_name("fp32"), OptimSpec(), shape)
    with pytest.raises(UnsupportedError, match="turn: complex parameters"):
        prepared.prepare(ParameterPolicy(turn=torch.ones(2, dtype=torch.complex64)), recipe_by_name("fp32"), OptimSpec(), shape)


class ParameterPolicy(nn.ParameterDict):
    """Parameters alone, with their roles."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__({name: nn.Parameter(value) for name, value in parameters.items()})

    def parameter_roles(self) -> dict[str, Role]:
        return {name: Role(part="backbone", decay=True) for name in self}


def test_the_first_step_after_a_rehearsal_gets_its_batch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy normalises its batch in place."""

    class Normalising(nn.Linear):
        def forward(self, batch: dict[str, torch.Tensor]) -> Any:
            return SimpleNamespace(total=super().forward(batch["state"].sub_(1)).sum())

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(replicated, "dist", SimpleNamespace(get_world_size=lambda: 3))
    model = nn.parallel.DistributedDataParallel(Normalising(2, 1))
    stand_in: Any = SimpleNamespace(
        prepared=SimpleNamespace(model=model), compute=nullcontext, device=torch.device("cpu"), zero_grad=model.zero_grad
    )
    batches = [{"state": torch.full((1, 2), value)} for value in (5.0, 7.0)]
    values = [batch["state"][0, 0].item() for batch in Ddp.rehearse(stand_in, iter(batches))]
    torch.distributed.destroy_process_group()
    assert values == [5.0, 7.0]
    assert all(parameter.grad is None for parameter in model.parameters())
