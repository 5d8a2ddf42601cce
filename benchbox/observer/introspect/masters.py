"""Master weights and their substitutes: masters that optimizers declare, compensation of rounding, offload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from .tensors import dtype_name, has_class_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

# Attributes of DeepSpeed's optimizers: the flat tensors they step, the 16-bit partitions these are rounded into, and the
# parameters they cover. In this order: ZeRO-1 and 2, the bf16 optimizer, ZeRO-3.
_PARTITIONS = (
    ("single_partition_of_fp32_groups", "parallel_partitioned_bit16_groups", "bit16_groups"),
    ("fp32_groups_flat_partition", "bf16_partitioned_groups", "bf16_groups"),
    ("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", "fp16_groups"),
)
# Modules of optimizers that step exactly the tensors in their groups, and round updates to the tensors' own dtype (transformers
# has Adafactor). Any other optimizer may keep masters or compensation that cannot be seen.
_KNOWN_MODULES = ("torch.optim.", "deepspeed.ops.adam.", "optimi.", "transformers.optimization.")


class MasterLink(NamedTuple):
    """A stepped tensor, the parameters it stands for, and the live tensor (or part of one) that it is rounded into.

    Where that is a whole parameter, `live` is the parameter itself: the training may give it another storage at every step.
    """

    stepped: Tensor
    name: str
    live: Tensor | None
    covers: tuple[tuple[str, int], ...] = ()  # (name, id) of the parameters in a partition


def has_known_arithmetic(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to step only the tensors in its groups, in their own dtype.

    A subclass that leaves the arithmetic to the `step` of its base class is as known as that.
    """
    for kind in type(optimizer).__mro__:
        if "step" in vars(kind):
            step = _without_wrappers_of_torch(vars(kind)["step"])
            if f"{_defining_module(step)}.".startswith(_KNOWN_MODULES):
                return True
            if not _calls_base_step(step):
                return False
    return False


def _without_wrappers_of_torch(step: Any) -> Any:
    """Return the function that torch's hooks and no_grad wrap; a subclass gets a wrapped copy of the step that it inherits."""
    while _defining_module(step).startswith("torch.") and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def _defining_module(function: Any) -> str:
    """Return the module whose code a function is. Its `__module__` may be copied from the function that it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _calls_base_step(step: Any) -> bool:
    """Return whether a method runs `super().step(...)`."""
    code = getattr(step, "__code__", None)
    return code is not None and "__class__" in code.co_freevars and "step" in code.co_names


def declared_masters(chain: Sequence[Any], live: Mapping[int, str]) -> Iterator[MasterLink]:
    """Yield the tensors that the optimizers of a chain declare to step in place of parameters.

    Args:
        chain: an optimizer and its wrappers.
        live: the name of each live parameter by its id.
    """
    for optimizer in chain:
        yield from _zero_partitions(optimizer, live)
        if has_class_named(optimizer, "MasterWeightOptimizer"):
            yield from _stepped_pairs(optimizer.stepped(), live)


def _zero_partitions(optimizer: Any, live: Mapping[int, str]) -> Iterator[MasterLink]:
    for masters, rounded, covered in _PARTITIONS:
        for index, tensor in enumerate(getattr(optimizer, masters, None) or ()):
            group = _item(getattr(optimizer, covered, ()), index) or ()
            covers = tuple((live.get(id(parameter), "?"), id(parameter)) for parameter in group)
            name = f"{type(optimizer).__name__}.{masters}[{index}]"
            yield MasterLink(tensor, name, _rank_partition(_item(getattr(optimizer, rounded, ()), index), tensor), covers)


def _item(items: Any, index: int) -> Any:
    return items[index] if items is not None and index < len(items) else None


def _rank_partition(rounded: Any, stepped: Tensor) -> Tensor | None:
    """Return this rank's partition of a 16-bit group. ZeRO-1 and 2 keep a list of all ranks' partitions, in rank order."""
    if isinstance(rounded, (list, tuple)):
        rounded = _item(rounded, dist.get_rank() if dist.is_available() and dist.is_initialized() else 0)
    return rounded if isinstance(rounded, Tensor) and rounded.numel() == stepped.numel() else None


def _stepped_pairs(pairs: Iterable[tuple[Tensor, Tensor]], live: Mapping[int, str]) -> Iterator[MasterLink]:
    """Yield a link per (live parameter, tensor stepped for it); several tensors for a parameter are consecutive parts of it."""
    offsets: dict[int, int] = {}
    for parameter, tensor in pairs:
        start = offsets.get(id(parameter), 0)
        offsets[id(parameter)] = start + tensor.numel()
        name = live.get(id(parameter))
        if name is not None:
            part = parameter.detach().reshape(-1)[start : start + tensor.numel()] if parameter.is_contiguous() else None
            yield MasterLink(tensor, name, part, ((name, id(parameter)),))


def detect_compensation(optimizer: Optimizer, optimizer_state: Mapping[str, Any]) -> str | None:
    """Return what keeps this optimizer from losing updates of 16-bit tensors, or None.

    Recognised are stochastic rounding (torchao) and the states that `compensating_state` knows.
    """
    if getattr(optimizer, "bf16_stochastic_round", False):
        return "stochastic rounding"
    return compensating_state({name: dtype_name(value) for name, value in optimizer_state.items() if isinstance(value, Tensor)})


def compensating_state(dtypes: Mapping[str, str]) -> str | None:
    """Return the optimizer state that keeps updates of 16-bit tensors from being lost, or None.

    Recognised are Kahan buffers (torchdistx, optimi), and masters or their low halves (TransformerEngine's `master_param`,
    int16 when it stores remainders; `master` in another name).

    Args:
        dtypes: dtypes of the state tensors by name.
    """
    for name in dtypes:
        if "kahan" in name or name == "compensation":
            return f"Kahan buffer {name}"
    master = next((name for name in dtypes if "master" in name), None)
    return None if master is None else f"state {master} in {dtypes[master]}"


def declared_offload(chain: Sequence[Any]) -> str | None:
    """Return a declared offload of masters or optimizer state to the CPU, in words, or None."""
    for optimizer in chain:
        name = type(optimizer).__name__
        is_torchao = name == "CPUOffloadOptimizer"
        if is_torchao or getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
            return f"{name} offloads its optimizer state"
    return None
