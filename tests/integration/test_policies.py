"""Every policy on every backend: each pair of policy, backend, attention, checkpointing and cameras is run at least once.

And on two backends every other mode that a policy has as a tiny preset.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch

from benchbox.registry.backends import backend_info
from benchbox.registry.policies import find_policies
from tests.support.ranks import run_cells, tiny_cell

pytestmark = pytest.mark.ranks

FOUND = find_policies()
POLICIES = sorted(FOUND)
RANKS = {"single": 1, "ddp": 2, "fsdp1_full": 2, "fsdp1_grad_op": 2, "fsdp2": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp": 4}
# Among these four every two of the three occur in every combination.
KERNELS = [("eager", False, 1), ("eager", True, 4), ("sdpa", False, 4), ("sdpa", True, 1)]


def cover() -> list[dict[str, Any]]:
    """One cell for each policy and backend; the kernels take turns along both."""
    cells = []
    for (i, policy), (j, backend) in product(enumerate(POLICIES), enumerate(RANKS)):
        allowed = [kernels for kernels in KERNELS if not (kernels[1] and backend == "zero3")]
        attention, checkpointing, cams = allowed[(i + j) % len(allowed)]
        cells.append(
            {
                "policy": policy,
                "size": "tiny",
                "backend": backend,
                "attention": attention,
                "checkpointing": checkpointing,
                "cams": cams,
            }
        )
    return cells


def modes() -> list[dict[str, Any]]:
    """One cell for each mode of a policy and two backends: one that waits for every gradient, one that shards every layer."""
    sizes = [(policy, size) for policy in POLICIES for size in FOUND[policy].presets if size.startswith("tiny_")]
    return [
        {"policy": policy, "size": size, "backend": backend, "attention": "sdpa", "checkpointing": False, "cams": 1}
        for (policy, size), backend in product(sizes, ("ddp", "fsdp2"))
    ]


COVER = cover()
CELLS = [*COVER, *modes()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Two steps of each cell in float32, and of what each is compared with: one process with the same global batch of four."""
    references = [dict(cell, backend="single") for cell in CELLS]
    wanted = {tuple(cell.values()): cell for cell in [*CELLS, *references]}
    found = {}
    for ranks in (1, 2, 4):
        some = [cell for cell in wanted.values() if RANKS[cell["backend"]] == ranks]
        cells = [(tiny_cell(**cell, world_size=ranks, batch=4 // ranks, recipe="fp32"), 2) for cell in some]
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        for cell, result in zip(some, run_cells(cells, folder, witness=False, act=True), strict=True):
            result["gradient"] = torch.load(folder / f"{result['index']}.pt", weights_only=True)
            found[tuple(cell.values())] = result
    return found


def test_every_pair_of_values_occurs() -> None:
    """But checkpointing under ZeRO-3, which is refused."""
    axes = {name: {cell[name] for cell in COVER} for name in COVER[0]}
    for first, second in combinations(axes, 2):
        seen = {(cell[first], cell[second]) for cell in COVER}
        missing = set(product(axes[first], axes[second])) - seen
        assert missing <= {("zero3", True)}, (first, second)
    assert backend_info("zero3").refusal(world_size=2, recipe="fp32", checkpointing=True)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell.values())))
def test_a_step_is_that_of_one_process(results: dict[tuple[Any, ...], dict[str, Any]], cell: dict[str, Any]) -> None:
    """In float32, from the same seed and global batch: two losses, and the gradient of every parameter that is trained."""
    result, reference = results[tuple(cell.values())], results[tuple(dict(cell, backend="single").values())]
    assert result["observed"]["backend"] == cell["backend"]
    assert result["loss"] == pytest.approx(reference["loss"], rel=1e-4)
    assert result["gradient"].keys() == reference["gradient"].keys()
    assert len(result["gradient"]) > 20
    for name, wanted in reference["gradient"].items():
        torch.testing.assert_close(result["gradient"][name], wanted, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("cell", COVER, ids=lambda cell: "-".join(map(str, cell.values())))
def test_through_its_wrapper_a_policy_acts_as_one_process_does(
    results: dict[tuple[Any, ...], dict[str, Any]], cell: dict[str, Any]
) -> None:
    """In float32 on the same two samples, before the first step, which the losses show to be undisturbed."""
    actions = results[tuple(cell.values())]["actions"]
    reference = results[tuple(dict(cell, backend="single").values())]["actions"]
    if cell["policy"] in ("pi07_high_level", "value"):
        assert actions is reference is None, "these do not act"
        return
    torch.testing.assert_close(torch.tensor(actions), torch.tensor(reference), rtol=1e-4, atol=1e-4)
    assert torch.tensor(actions).any()
