"""Settings of a backend that can tilt a comparison of backends, read from the wrappers that have them in force.

Names are those of the wrapper's own library; sizes of DeepSpeed's buckets are elements, those of DDP's are bytes. Several are
private attributes: one that another version of the library lacks is null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from benchbox.observer.introspect.tensors import has_class_named
from benchbox.observer.introspect.wrappers import configured_reduction, fsdp1_handles, fsdp1_units, zero_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from benchbox.registry.launch_record import Setting

# Attributes of the live objects, in the order shown. A leading underscore is left out of the setting's name.
_DDP = ("bucket_bytes_cap", "find_unused_parameters", "static_graph", "gradient_as_bucket_view", "broadcast_buffers")
_FSDP1_UNIT = ("backward_prefetch", "forward_prefetch", "limit_all_gathers")
_FSDP1_HANDLE = ("_use_orig_params", "_offload_params", "_reduce_dtype")
_FSDP2_GROUP = ("reshard_after_backward", "unshard_in_backward", "unshard_async_op")
_ZERO = ("reduce_scatter", "reduce_bucket_size", "contiguous_gradients")
# check_grad_overflow: a scan of all gradients for values that are not finite, and an all-reduce of its result, in each step
_ZERO_12 = ("overlap_comm", "allgather_bucket_size", "round_robin_gradients", "cpu_offload", "check_grad_overflow")
_ZERO_3 = ("offload_optimizer", "offload_param")
_ZERO_3_FETCH = {
    "prefetch_bucket_size": "_prefetch_bucket_sz",
    "param_persistence_threshold": "param_numel_persistence_threshold",
    "max_live_parameters": "_max_available_parameters_in_numel",
    "max_reuse_distance": "_max_reuse_distance_in_numel",
}
_OPTIMIZER = ("fused", "foreach")


def read_settings(model: nn.Module, chain: list[Any]) -> dict[str, Setting]:
    """Return the settings in force in a prepared model and its chain of optimizers, outermost first."""
    zero = zero_optimizer(chain)
    settings: dict[str, Setting] = {}
    if zero is not None:
        settings = _zero_settings(model, zero)
    elif fsdp1_units(model):
        settings = _read(fsdp1_units(model), _FSDP1_UNIT) | _read(fsdp1_handles(model), _FSDP1_HANDLE)
        settings["param_dtype"] = _combine(handle._fwd_bwd_param_dtype for handle in fsdp1_handles(model))  # noqa: SLF001
    elif states := _fsdp2_states(model):
        settings = _fsdp2_settings(states)
    elif isinstance(model, DistributedDataParallel):
        settings = _ddp_settings(model)
    return settings | {f"optimizer_{name}": _plain(chain[-1].defaults.get(name)) for name in _OPTIMIZER}


def _ddp_settings(model: DistributedDataParallel) -> dict[str, Setting]:
    reduce_dtype: Setting
    hooks = [hook for hook, _ in model._comm_hooks]  # noqa: SLF001
    if hooks:  # the dtype is known of torch's own hooks alone
        compression = configured_reduction(model)
        reduce_dtype = None if compression is None else compression.dtype
    else:
        reduce_dtype = _combine(parameter.dtype for parameter in model.parameters() if parameter.requires_grad)
    names = _combine(getattr(hook, "__name__", type(hook).__name__) for hook in hooks)
    return _read([model], _DDP) | {"comm_hook": names, "reduce_dtype": reduce_dtype}


def _zero_settings(model: Any, zero: Any) -> dict[str, Setting]:
    settings = _read([zero], _ZERO) | {"reduce_dtype": _plain(zero.communication_data_type)}
    if not type(zero).__name__.endswith("Stage3"):
        return settings | _read([zero], _ZERO_12)
    fetch = {name: _plain(getattr(zero.parameter_offload, attribute, None)) for name, attribute in _ZERO_3_FETCH.items()}
    settings |= _read([zero], _ZERO_3) | fetch
    return settings | {
        # Stage 3 keeps only the streams that follow from it, and a CPU has none.
        "overlap_comm": _plain(model.zero_overlap_comm()),
        # DeepSpeed replaces torch's function by its own, which rounds the product before it adds the bias.
        "memory_efficient_linear": torch.nn.functional.linear.__module__.startswith("deepspeed"),
    }


def _fsdp2_states(model: nn.Module) -> list[Any]:
    modules: list[Any] = [module for module in model.modules() if has_class_named(module, "FSDPModule")]
    return [module._get_fsdp_state() for module in modules]  # noqa: SLF001


def _fsdp2_settings(states: list[Any]) -> dict[str, Setting]:
    groups = [group for state in states for group in _parameter_groups(state)]
    policies = [(parameter.mp_policy, parameter.sharded_param.dtype) for group in groups for parameter in group.fsdp_params]
    return _read(groups, _FSDP2_GROUP) | {
        "reshard_after_forward": _combine(group.post_forward_mesh_info is not None for group in groups),
        # without explicit ones, FSDP2 prefetches the next unit of the backward pass
        "explicit_forward_prefetch": any(state._states_to_forward_prefetch for state in states),  # noqa: SLF001
        "explicit_backward_prefetch": any(state._states_to_backward_prefetch for state in states),  # noqa: SLF001
        "offload_policy": _combine(type(group.offload_policy).__name__ for group in groups),
        "param_dtype": _combine(policy.param_dtype or dtype for policy, dtype in policies),
        "reduce_dtype": _combine(policy.reduce_dtype or policy.param_dtype or dtype for policy, dtype in policies),
    }


def _parameter_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)  # noqa: SLF001
    group = state._fsdp_param_group  # noqa: SLF001 (torch 2.12 and earlier have one at most)
    return [] if group is None else [group]


def _read(owners: list[Any], names: tuple[str, ...]) -> dict[str, Setting]:
    return {name.lstrip("_"): _combine(getattr(owner, name, None) for owner in owners) for name in names}


def _combine(values: Iterable[Any]) -> Setting:
    """Return the one value there is, several different ones as text, or None without any."""
    distinct = {repr(value): value for value in map(_plain, values)}
    if len(distinct) > 1:
        return ", ".join(sorted(str(value) for value in distinct.values()))
    return next(iter(distinct.values()), None)


def _plain(value: Any) -> Setting:
    """Return the value in a form that JSON has: dtypes and members of enumerations by name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(getattr(value, "name", value))
