"""Every policy on every backend: each pair of policy, backend, attention, checkpointing and cameras is run at least once.

Every additional tiny preset of a policy is run on two backends.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import torch

from benchbox.registry.backends import backend_info
from benchbox.registry.policies import find_policies
from tests.support.ranks import CellRun, run_cells, tiny_cell
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.ranks

ENTRIES = find_policies()
POLICIES = sorted(ENTRIES)
RANKS = {"single": 1, "ddp": 2, "fsdp1_full": 2, "fsdp1_grad_op": 2, "fsdp2": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp": 4}
# Those of a group share processes.
GROUPS = (("single",), ("ddp", "fsdp1_full", "fsdp1_grad_op", "fsdp2"), ("zero1", "zero2", "zero3"), ("hsdp",))
# By default every policy runs on DDP and FSDP2, whose code depends on the modules of a policy, every second one on ZeRO-3, and
# each mode of a policy on FSDP2. All backends run in test_backends, and cosmos_droid starts on ZeRO-3 in test_construction.
DEFAULT_BACKENDS = ("ddp", "fsdp2")
ON_ZERO3 = POLICIES[1::2]
# Pairwise covering: every combination of two of the three axes occurs in these four.
KERNELS = [("eager", False, 1), ("eager", True, 4), ("sdpa", False, 4), ("sdpa", True, 1)]


def cover() -> list[dict[str, Any]]:
    """Return one cell for each policy and backend, with kernels alternating along both."""
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
    """Return cells of each mode of a policy on two backends: DDP waits for every gradient, FSDP2 shards every layer."""
    sizes = [(policy, size) for policy in POLICIES for size in ENTRIES[policy].presets if size.startswith("tiny_")]
    return [
        {"policy": policy, "size": size, "backend": backend, "attention": "sdpa", "checkpointing": False, "cams": 1}
        for (policy, size), backend in product(sizes, ("ddp", "fsdp2"))
    ]


COVER = cover()
CELLS = [*COVER, *modes()]


def is_default(cell: dict[str, Any]) -> bool:
    """Return whether this cell runs without `--exhaustive`."""
    if cell["size"] != "tiny":
        return cell["backend"] == "fsdp2"
    return cell["backend"] in DEFAULT_BACKENDS or (cell["backend"] == "zero3" and cell["policy"] in ON_ZERO3)


def reference_of(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the single process that a cell is compared with: neither kernel nor recomputation changes a step."""
    return dict(cell, backend="single", attention="eager", checkpointing=False)


class Results(dict[tuple[Any, ...], dict[str, Any]]):
    """Results of two steps of each cell in float32, and of its reference, a single process with the same global batch of four.

    Cells of a group of backends run when one is first asked for.
    """

    def __init__(self, tmp_path_factory: pytest.TempPathFactory, *, exhaustive: bool) -> None:
        super().__init__()
        self._tmp_path_factory = tmp_path_factory
        self._cells = [cell for cell in CELLS if exhaustive or is_default(cell)]

    def __missing__(self, key: tuple[Any, ...]) -> dict[str, Any]:
        backend = dict(zip(COVER[0], key, strict=True))["backend"]
        self._run(next(group for group in GROUPS if backend in group))
        return dict.__getitem__(self, key)

    def _run(self, backends: tuple[str, ...]) -> None:
        (ranks,) = {RANKS[backend] for backend in backends}
        references = [reference_of(cell) for cell in self._cells]
        cells_by_key = {tuple(cell.values()): cell for cell in [*self._cells, *references]}
        group = [cell for cell in cells_by_key.values() if cell["backend"] in backends]
        cells = [tiny_cell(**cell, world_size=ranks, batch=4 // ranks, recipe="fp32") for cell in group]
        runs = [CellRun(cell, 2, act=cell.size == "tiny") for cell in cells]
        folder = self._tmp_path_factory.mktemp(backends[0])
        for cell, result in zip(group, run_cells(runs, folder), strict=True):
            result["gradient"] = torch.load(folder / f"{result['index']}.pt", weights_only=True)
            self[tuple(cell.values())] = result


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Results:
    return Results(tmp_path_factory, exhaustive=exhaustive)


def test_every_pair_of_values_occurs() -> None:
    """The exception is checkpointing under ZeRO-3, which is refused."""
    axes = {name: {cell[name] for cell in COVER} for name in COVER[0]}
    for axis, second_axis in combinations(axes, 2):
        covered = {(cell[axis], cell[second_axis]) for cell in COVER}
        missing = set(product(axes[axis], axes[second_axis])) - covered
        assert missing <= {("zero3", True)}, (axis, second_axis)
    assert backend_info("zero3").refusal(tiny_cell(backend="zero3", recipe="fp32", checkpointing=True))


@pytest.mark.parametrize("cell", in_tiers(CELLS, is_default), ids=lambda cell: "-".join(map(str, cell.values())))
def test_a_step_equals_that_of_one_process(results: dict[tuple[Any, ...], dict[str, Any]], cell: dict[str, Any]) -> None:
    """Two losses and the gradient of every trainable parameter agree, in float32 from the same seed and global batch."""
    result, reference = results[tuple(cell.values())], results[tuple(reference_of(cell).values())]
    assert result["observed"]["backend"] == cell["backend"]
    assert result["loss"] == pytest.approx(reference["loss"], rel=1e-4)
    assert result["gradient"].keys() == reference["gradient"].keys()
    assert len(result["gradient"]) > 20
    for name, expected in reference["gradient"].items():
        torch.testing.assert_close(result["gradient"][name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("cell", in_tiers(COVER, is_default), ids=lambda cell: "-".join(map(str, cell.values())))
def test_a_wrapped_policy_selects_the_actions_of_one_process(
    results: dict[tuple[Any, ...], dict[str, Any]], cell: dict[str, Any]
) -> None:
    """Actions of the same two samples are selected in float32 before the first step, whose losses are unaffected."""
    actions = results[tuple(cell.values())]["actions"]
    reference = results[tuple(reference_of(cell).values())]["actions"]
    if cell["policy"] in ("pi07_high_level", "value"):
        assert actions is reference is None, "these do not act"
        return
    torch.testing.assert_close(torch.tensor(actions), torch.tensor(reference), rtol=1e-4, atol=1e-4)
    assert torch.tensor(actions).any()
