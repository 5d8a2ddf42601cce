"""DeepSpeed's ZeRO checkpoints: one optimizer file a rank, masters and state in flat partitions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchbox.audit.subjects.checkpoint.optimizers import by_number
from benchbox.audit.subjects.checkpoint.safe import Inert, load_file
from benchbox.audit.subjects.checkpoint.stored import Stored, StoredTensor
from benchbox.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")


def zero_folder(folder: Path) -> Path | None:
    """The folder of the optimizer files: this one, or the one that `latest` names. None if this is no such checkpoint."""
    latest = folder / "latest"
    if latest.is_file():
        named = folder / latest.read_text(errors="replace").strip().split("/")[-1]
        return named if named.is_dir() else None
    return folder if any(_RANK.search(path.name) for path in folder.iterdir()) else None


def read_zero(folder: Path) -> list[Stored]:
    """Every rank of a ZeRO-1, 2 or 3 checkpoint.

    Raises:
        DataError: a file is damaged or missing, or the ranks do not make up the world they were saved by.
    """
    files = {int(match[1]): path for path in folder.iterdir() if (match := _RANK.search(path.name))}
    if not files:
        raise DataError(f"{folder}: holds no optimizer states of ZeRO (*_optim_states.pt)")
    models = sorted(folder.glob("*model_states.pt"))
    if not models:
        raise DataError(f"{folder}: holds no *model_states.pt beside the optimizer states")
    saved = load_file(models[0])
    model = {name: held for name, held in saved.get("module", {}).items() if isinstance(held, Tensor)}
    shapes = [dict(group) for group in saved.get("param_shapes") or ()]
    world = int(saved.get("dp_world_size") or len(files))
    if missing := sorted(set(range(world)) - files.keys()):
        raise DataError(f"{folder}: the optimizer states of rank {', '.join(map(str, missing))} of {world} are missing")
    begun: dict[str, int] = {}  # how much of each parameter former ranks hold
    return [
        Stored(
            rank=rank,
            world_size=world,
            optimizer="DeepSpeed ZeRO",
            model=model if rank == 0 else {},
            stepped=list(_stepped(load_file(path), path, model, shapes, begun, world)),
        )
        for rank, path in sorted(files.items())
    ]


def _stepped(
    saved: Any, path: Path, model: Mapping[str, Tensor], shapes: Sequence[Mapping[str, Any]], begun: dict[str, int], world: int
) -> Iterator[StoredTensor]:
    state = saved.get("optimizer_state_dict") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise DataError(f"{path}: holds no optimizer_state_dict")
    masters = state.get("single_partition_of_fp32_groups", state.get("fp32_flat_groups"))
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if not isinstance(masters, list) or not isinstance(inner, dict):
        raise DataError(f"{path}: holds no partitions of masters with their state")
    slices = state.get("param_slice_mappings") or [None] * len(masters)
    for index, (master, (_, held, options)) in enumerate(zip(masters, by_number(inner), strict=False)):
        if slices[index]:
            yield from _by_parameter(master, held, options, slices[index], model, begun)
        else:
            names = _covered(master, index, len(masters), shapes, world)
            yield StoredTensor(name=f"partition {index}", weight=master, state=held, options=options, covers=tuple(names))


def _by_parameter(
    master: Tensor,
    state: Mapping[str, Any],
    options: Mapping[str, Any],
    slices: Mapping[str, Any],
    model: Mapping[str, Tensor],
    begun: dict[str, int],
) -> Iterator[StoredTensor]:
    """A partition, cut into the parameters (or the parts of them) that it holds."""
    for name, fragment in slices.items():
        numel, start = _extent(fragment)
        before = begun.get(name, 0)
        begun[name] = before + numel
        live = model[name].reshape(-1)[before : before + numel] if name in model else None
        part = slice(start, start + numel)
        cut = {
            key: value[part] if isinstance(value, Tensor) and value.shape == master.shape else value
            for key, value in state.items()
        }
        yield StoredTensor(name=name, weight=master[part], live=live, state=cut, options=options)


def _extent(fragment: Any) -> tuple[int, int]:
    """(elements, first of them in the partition) of DeepSpeed's `fragment_address`, of which only what it holds was read."""
    held = fragment.state if isinstance(fragment, Inert) else {}
    return int(held["numel"]), int(held["start"])


def _covered(master: Tensor, index: int, groups: int, shapes: Sequence[Mapping[str, Any]], world: int) -> list[str]:
    """Names of the parameters in a partition of ZeRO-3: a group for a group, where the sizes add up."""
    if groups != len(shapes):
        return []
    sizes = sum(-(-shape.numel() // world) for shape in shapes[index].values())
    return list(shapes[index]) if sizes <= master.numel() else []
