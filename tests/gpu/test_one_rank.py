"""Process groups of NCCL with a single rank: the code of several, as far as one GPU can run it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.ranks import run_ranks, tiny_cell

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.ranks

SCRIPT = Path(__file__).parent / "rank_script.py"
BACKENDS = ("ddp", "fsdp2", "zero2")
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP", "zero2": "DeepSpeedEngine"}


@pytest.fixture(scope="module")
def results(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of one process group: `collectives`, and the steps of every backend by its name."""
    folder = tmp_path_factory.mktemp("one_rank")
    cells = [tiny_cell(backend=backend, world_size=1).to_dict() for backend in BACKENDS]
    job = folder / "job.json"
    job.write_text(json.dumps({"cells": cells, "steps": 4, "out": str(folder)}))
    run_ranks(1, SCRIPT, str(job))
    steps = {backend: json.loads((folder / f"{index}.json").read_text()) for index, backend in enumerate(BACKENDS)}
    return {"collectives": json.loads((folder / "collectives.json").read_text()), **steps}


def test_collectives_over_one_rank_return_what_they_were_given(results: dict[str, Any], device: torch.device) -> None:
    collectives = results["collectives"]
    assert collectives.pop("backend") == ("nccl" if device.type == "cuda" else "gloo")
    assert set(collectives) == {"torch.float32", "torch.bfloat16"}
    for tensors in collectives.values():
        assert tensors == [list(range(8))] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_over_one_rank_steps_inside_its_wrapper(results: dict[str, Any], device: torch.device, backend: str) -> None:
    result = results[backend]
    assert result["device"] == device.type
    assert WRAPPERS[backend] in result["model_class"]
    assert result["collectives"].get("all_reduce", 0) > 0, "no gradient or norm was reduced through the process group"


def test_backends_over_one_rank_train_alike(results: dict[str, Any]) -> None:
    """One recipe from one seed: the first forward pass is the same, later losses differ by the order of summation at most."""
    losses = {backend: results[backend]["loss"] for backend in BACKENDS}
    for backend in BACKENDS[1:]:
        assert losses[backend][0] == pytest.approx(losses["ddp"][0], rel=1e-5), backend
        assert losses[backend] == pytest.approx(losses["ddp"], rel=1e-2), backend
