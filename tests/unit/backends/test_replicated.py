"""Single and DDP keep masters with all the bits of the policy, before its parameters are rounded to the storage dtype."""

from __future__ import annotations

import pytest
import torch

from benchbox.backends.accelerators import single_accelerator
from benchbox.backends.replicated import Ddp, Single
from benchbox.optim import MasterWeightOptimizer
from benchbox.session.build import build_cell_policy, build_session
from benchbox.spec.cell import Cell, DataSpec
from tests.support.direct_construction import initial_parameters

STATISTICS = [{"action": {"q01": [-1.0] * 7, "q99": [1.0] * 7}}]
SETUP = {"policy": "pi05", "size": "tiny", "batch": 1, "recipe": "bf16_master", "data": DataSpec(kind="synthetic")}


@pytest.mark.parametrize("backend", [Single, Ddp])
def test_masters_hold_the_digits_that_the_cast_to_bfloat16_rounds_away(
    backend: type[Single | Ddp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP prepares without its process group here: masters are made before anything is wrapped."""
    monkeypatch.setattr(backend, "_accelerator", lambda _: single_accelerator())
    cell = Cell(**SETUP, backend=backend.name, world_size=2 if backend is Ddp else 1)  # type: ignore[arg-type]
    session = build_session(cell, build_cell_policy(cell), STATISTICS)
    stepping = session.backend.prepared.stepping
    assert type(session.backend) is backend
    assert isinstance(stepping, MasterWeightOptimizer)
    names = {id(parameter): name for name, parameter in session.model.named_parameters()}
    initial = initial_parameters(cell)
    live = [(names[id(parameter)], parameter) for group in stepping.param_groups for parameter in group["params"]]
    assert {parameter.dtype for _, parameter in live} == {torch.bfloat16}
    for (name, _), master in zip(live, stepping.masters, strict=True):
        assert torch.equal(master, initial[name]), name
    rounded = [name for name, parameter in live if not torch.equal(parameter.float(), initial[name])]
    assert len(rounded) > 10, "otherwise masters that were made after the cast would be equal too"
