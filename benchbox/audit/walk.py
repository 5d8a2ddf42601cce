"""Finding one's way through wrapped models and optimizers: partitions, local shards, names, compensation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.optim import Optimizer

from benchbox.measure.witness.setup import optimizer_chain
from benchbox.optim.groups import own_name
from benchbox.optim.masters import MasterWeightOptimizer

# Where ZeRO-1/2, DeepSpeed's bf16 optimizer and ZeRO-3 keep the flat tensors they step.
_PARTITIONS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
# Optimizers whose arithmetic is known: each steps exactly the tensors in its groups, in their own dtype. Any other may hide
# masters or compensation.
_KNOWN_MODULES = ("torch.optim.", "deepspeed.ops.adam.")


def is_wrapper(optimizer: Any) -> bool:
    return len(optimizer_chain(optimizer)) > 1


def is_known(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith(_KNOWN_MODULES)


def partitions(chain: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the flat partitions that DeepSpeed's optimizers in the chain step in place of parameters."""
    for optimizer in chain:
        for attribute in _PARTITIONS:
            for index, tensor in enumerate(getattr(optimizer, attribute, ())):
                yield f"{type(optimizer).__name__}.{attribute}[{index}]", tensor


def master_names(chain: list[Any], live: Mapping[int, str]) -> dict[int, str]:
    """Names of benchbox's own masters by id: each is called what the live parameter it stands for is called in `live`."""
    return {
        id(master): live[id(parameter)]
        for optimizer in chain
        if isinstance(optimizer, MasterWeightOptimizer)
        for parameter, master in optimizer.stepped()
        if id(parameter) in live
    }


def live_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters of a wrapped model, by the names they had before it was wrapped."""
    for path, parameter in model.named_parameters():
        yield own_name(path), parameter


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: the shard of a DTensor or of a ZeRO-3 parameter, else the tensor itself."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    shard = getattr(tensor, "ds_tensor", None)
    return shard if isinstance(shard, Tensor) else tensor


def compensation(optimizer: Optimizer, state: Mapping[str, Any]) -> str | None:
    """What keeps updates of 16-bit tensors from being lost inside this optimizer, or None.

    Recognised: stochastic rounding (torchao), Kahan buffers (torchdistx, optimi), and masters or their low halves kept in the
    state (TransformerEngine's `master_param`, int16 when it stores remainders).
    """
    if getattr(optimizer, "bf16_stochastic_round", False):
        return "stochastic rounding"
    for name in state:
        if "kahan" in name or name == "compensation":
            return f"Kahan buffer {name}"
    if "master_param" in state:
        return f"state master_param in {dtype_name(state['master_param'])}"
    return None


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
