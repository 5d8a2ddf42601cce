"""Finding one's way through wrapped models and optimizers: names, partitions, masters, compensation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from .tensors import dtype_name, has_class_named, local_shard
from .wrappers import fsdp1_handles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch.optim import Optimizer

# What wrappers put into parameter names; removed, the names are the model's own again.
_WRAPPER_PARTS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module"})
# Where DeepSpeed keeps the flat tensors it steps, the 16-bit partitions they are rounded into, and the parameters they cover:
# ZeRO-1/2, its bf16 optimizer, ZeRO-3.
_PARTITIONS = (
    ("single_partition_of_fp32_groups", "parallel_partitioned_bit16_groups", "bit16_groups"),
    ("fp32_groups_flat_partition", "bf16_partitioned_groups", "bf16_groups"),
    ("fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat", "fp16_groups"),
)
# Optimizers whose arithmetic is known: each steps exactly the tensors in its groups, in their own dtype. Any other may hide
# masters or compensation.
_KNOWN_MODULES = ("torch.optim.", "deepspeed.ops.adam.")


class MasterLink(NamedTuple):
    """A tensor that is stepped, what it stands for, and the live tensor (or part of one) that it is rounded into."""

    stepped: Tensor
    name: str
    live: Tensor | None
    covers: tuple[tuple[str, int], ...] = ()  # (name, id) of the parameters in a partition


def unwrapped_name(wrapped_name: str) -> str:
    """A parameter's name in the unwrapped model."""
    return ".".join(part for part in wrapped_name.split(".") if part not in _WRAPPER_PARTS)


def live_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a wrapped model, by the names they had before it was wrapped."""
    for path, parameter in model.named_parameters():
        yield unwrapped_name(path), parameter


def dimensions(model: nn.Module) -> dict[int, int]:
    """How many dimensions each parameter has when nothing is sharded, by the parameter's id; unknown ones are left out.

    FSDP1 leaves a rank flat pieces and ZeRO-3 empty tensors; both remember the shapes.
    """
    found = {id(p): len(getattr(p, "ds_shape", p.shape)) for p in model.parameters() if not has_class_named(p, "FlatParameter")}
    for handle in fsdp1_handles(model):
        flat = handle.flat_param
        for parameter, shape in zip(getattr(flat, "_params", None) or (), flat._shapes, strict=False):  # noqa: SLF001
            found[id(parameter)] = len(shape)
    return found


def is_known(optimizer: Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith(_KNOWN_MODULES)


def find_links(chain: Sequence[Any], live: Mapping[int, str]) -> Iterator[MasterLink]:
    """The tensors that optimizers of a chain declare to step in place of parameters.

    Args:
        live: name of each live parameter by its id.
    """
    for optimizer in chain:
        yield from _zero_links(optimizer, live)
        if callable(declared := getattr(type(optimizer), "stepped", None)):
            yield from _declared_links(declared(optimizer), live)


def _zero_links(optimizer: Any, live: Mapping[int, str]) -> Iterator[MasterLink]:
    for masters, rounded, covered in _PARTITIONS:
        for index, tensor in enumerate(getattr(optimizer, masters, None) or ()):
            group = _at(getattr(optimizer, covered, ()), index) or ()
            covers = tuple((live.get(id(each), "?"), id(each)) for each in group)
            name = f"{type(optimizer).__name__}.{masters}[{index}]"
            yield MasterLink(tensor, name, _own_part(_at(getattr(optimizer, rounded, ()), index), tensor), covers)


def _at(found: Any, index: int) -> Any:
    return found[index] if found is not None and index < len(found) else None


def _own_part(rounded: Any, stepped: Tensor) -> Tensor | None:
    """ZeRO-1/2 keep every rank's partition of the 16-bit group; this rank's has the place of this rank in the group."""
    if isinstance(rounded, (list, tuple)):
        import torch.distributed as dist

        rounded = _at(rounded, dist.get_rank() if dist.is_initialized() else 0)
    return rounded if isinstance(rounded, Tensor) and rounded.numel() == stepped.numel() else None


def _declared_links(pairs: Iterable[tuple[Tensor, Tensor]], live: Mapping[int, str]) -> Iterator[MasterLink]:
    """From (live parameter, tensor stepped for it or for the next part of it)."""
    done: dict[int, int] = {}
    for parameter, tensor in pairs:
        start = done.get(id(parameter), 0)
        done[id(parameter)] = start + tensor.numel()
        name = live.get(id(parameter))
        if name is not None:
            part = parameter.detach().reshape(-1)[start : start + tensor.numel()] if parameter.is_contiguous() else None
            yield MasterLink(tensor, name, part, ((name, id(parameter)),))


def compensation(optimizer: Optimizer, state: Mapping[str, Any]) -> str | None:
    """What keeps updates of 16-bit tensors from being lost inside this optimizer, or None.

    Recognised: stochastic rounding (torchao), and what `compensating_state` finds.
    """
    if getattr(optimizer, "bf16_stochastic_round", False):
        return "stochastic rounding"
    return compensating_state({name: dtype_name(value) for name, value in state.items() if isinstance(value, Tensor)})


def compensating_state(dtypes: Mapping[str, str]) -> str | None:
    """What keeps updates of 16-bit tensors from being lost, as far as an optimizer's state (dtypes by name) shows it: Kahan
    buffers (torchdistx, optimi), and masters or their low halves (TransformerEngine's `master_param`, int16 when it stores
    remainders).
    """
    for name in dtypes:
        if "kahan" in name or name == "compensation":
            return f"Kahan buffer {name}"
    return f"state master_param in {dtypes['master_param']}" if "master_param" in dtypes else None


def offload(chain: Sequence[Any]) -> str | None:
    """A declared offload of masters or optimizer state to the CPU, in the words of its setting."""
    for optimizer in chain:
        if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
            return f"{type(optimizer).__name__} offloads its optimizer state"
    return None


def storage_of(tensor: Tensor) -> int:
    """Where a tensor's elements lie: 0 where there are none, as in the empty shards of FSDP."""
    held = local_shard(tensor)
    return held.untyped_storage().data_ptr() if held.device.type != "meta" and held.numel() else 0
