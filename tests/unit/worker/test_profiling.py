"""Costs that a profile cannot see are unknown, and not zero."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchbox.worker.profiling import _known_bytes, _unseen_bytes
from tests.support.example_run import CELL

if TYPE_CHECKING:
    from benchbox.store.rank_profile import PhaseBytes

STEP = ["backward", "forward"]


@pytest.mark.parametrize(
    ("device", "changes", "unseen"),
    [
        ("cpu", {"recipe": "bf16_kahan", "attention": "flex"}, []),
        ("cpu", {"compile": "blocks"}, STEP),
        ("cuda", {}, []),
        ("cuda", {"attention": "flex"}, STEP),
        ("cuda", {"recipe": "bf16_kahan"}, ["optimizer"]),  # optimi steps by a Triton kernel
        ("cuda", {"recipe": "bf16_stochastic", "compile": "model"}, [*STEP, "optimizer"]),  # torchao compiles its step
    ],
    ids=str,
)
def test_phases_whose_work_is_no_operation_of_torch_have_unknown_bytes_with_a_reason(
    device: str, changes: dict[str, Any], unseen: list[str]
) -> None:
    reasons = _unseen_bytes(replace(CELL, **changes), torch.device(device))
    assert sorted(reasons) == sorted(unseen)
    assert all(reasons.values())
    seen: PhaseBytes = {"read": 1, "written": 2, "collectives": 3}
    known = _known_bytes(dict.fromkeys((*STEP, "optimizer", "clip"), seen), reasons)
    assert known["clip"] == seen
    assert {phase for phase, sizes in known.items() if sizes["read"] is sizes["written"] is None} == set(unseen)
    assert all(sizes["collectives"] == 3 for sizes in known.values())
