"""State dictionaries: optimizers and models are recognised by their structure, not by their key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchbox.audit.subjects.checkpoint.stored import StoredArray, describe_tensor
from benchbox.observer.introspect.masters import compensating_state
from benchbox.observer.introspect.names import unwrapped_name
from benchbox.observer.introspect.tensors import is_plain
from benchbox.observer.numerics.expected_update import float_or_none

if TYPE_CHECKING:
    from collections.abc import Iterator

_MAX_DEPTH = 5
# Words in the keys that masters are saved under: benchbox's `masters`, Megatron's `fp32_from_fp16_params`, apex's
# `fp32_from_fp16`, DeepSpeed's `fp32_groups_flat`.
_MASTER_WORDS = ("master", "fp32")
# An average of the weights is no model that was stepped.
_AVERAGES = ("ema", "shadow", "swa", "avg", "average", "averaged", "polyak", "teacher")
_LIGHTNING_STEPPED = "current_model_state"
_AVERAGED_COUNT = "n_averaged"  # of torch's `AveragedModel`
_TORCH = ("maximize", "foreach")  # options that all of torch's optimizers but LBFGS, Muon and SparseAdam have
# An option of each optimizer whose arithmetic is known, and the name that it shows. The first one that is there counts.
_KINDS = {
    "max_coeff": "Lamb",  # of DeepSpeed
    "grad_averaging": "Lamb or NovoGrad",  # of apex
    "bias_correction": "Adam or AdamW",  # of DeepSpeed, apex and TransformerEngine
    "scale_parameter": "Adafactor",  # of transformers
    "kahan_sum": "optimizer of optimi",
    "ns_steps": "Muon",
    "beta2_decay": "Adafactor",
    "amsgrad": "Adam or AdamW",
    "dampening": "SGD",
    "maximize": "optimizer of torch",
    "line_search_fn": "LBFGS",
}
_OF_BITSANDBYTES = "state1"  # its name for the first moment
_SHARED = frozenset({"amsgrad", "dampening"})  # options that optimizers of other libraries have, too: torchao, for example
# Row and column of a factored second moment, of transformers and of torch, and how many dimensions of 1 end the row.
_FACTORS = (("exp_avg_sq_row", "exp_avg_sq_col", 0), ("row_var", "col_var", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """One parameter in an optimizer's state dictionary: its number or name, its state, and the options of its group."""

    key: int | str
    group: int
    options: Mapping[str, Any]
    state: Mapping[str, StoredArray]
    step_count: float | None
    master: StoredArray | None = None
    name: str | None = None  # if the dictionary has names

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the stepped tensor, from its master or its state; None if it has neither."""
        if self.master is not None:
            return self.master.shape
        for row, column, trailing in _FACTORS:
            if row in self.state and column in self.state:
                rows = self.state[row].shape
                return (*rows[: len(rows) - trailing], *self.state[column].shape[-1:])
        return next((array.shape for array in self.state.values() if array.shape), None)

    @property
    def state_dtype(self) -> str | None:
        """Dtype of the tensor that one of torch's optimizers stepped, which creates its state in that; None if not known."""
        if any(option not in self.options for option in _TORCH):
            return None
        dtypes = {array.dtype for name, array in self.state.items() if name != "step" and array.ndim}
        return dtypes.pop() if len(dtypes) == 1 else None

    @property
    def compensation(self) -> str | None:
        """State that keeps updates of a 16-bit tensor from being lost, such as a master; None where there is none."""
        return compensating_state({name: array.dtype for name, array in self.state.items()})


def is_optimizer_state(value: object) -> bool:
    """Return whether this has the structure of `Optimizer.state_dict()`."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), Sequence)
        and all(isinstance(group, Mapping) and _are_keys(group.get("params")) for group in value["param_groups"])
    )


def _are_keys(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(key, (int, str)) for key in value)


def is_model_state(value: object) -> bool:
    """Return whether this has the structure of `Module.state_dict()`: names, and tensors of which some are floating."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    tensors = [item for item in value.values() if isinstance(item, Tensor)]
    extra = sum(not isinstance(item, Tensor) and not name.endswith("_extra_state") for name, item in value.items())
    return not extra and any(tensor.is_floating_point() and tensor.ndim for tensor in tensors)


def walk_mappings(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Yield (path, dictionary) of every dictionary in a saved value, without those inside of optimizers and models."""
    if isinstance(value, Mapping):
        yield path, value
        if is_optimizer_state(value) or is_model_state(value):
            return
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return
    if len(path) < _MAX_DEPTH:
        for key, item in items:
            yield from walk_mappings(item, (*path, key))


def collect_models(value: object) -> dict[str, StoredArray]:
    """Return the tensors of all models in a saved value, without averages. With several models, names begin with their keys."""
    models = {
        ".".join(path): mapping
        for path, mapping in walk_mappings(value)
        if is_model_state(mapping) and _AVERAGED_COUNT not in mapping and not any(is_average(key) for key in path)
    }
    # Lightning saves an average as `state_dict`, and beside it what was stepped.
    return merge_models({path: model for path, model in models.items() if path == _LIGHTNING_STEPPED} or models)


def merge_models(models: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredArray]:
    """Return the tensors of models by their unwrapped names; with several models, prefixed with the label of the model."""
    several = len(models) > 1
    return {
        f"{label}.{unwrapped_name(name)}" if several and label else unwrapped_name(name): _as_array(value)
        for label, model in models.items()
        for name, value in model.items()
        if isinstance(value, (Tensor, StoredArray))
    }


def _as_array(value: Tensor | StoredArray) -> StoredArray:
    return value if isinstance(value, StoredArray) else describe_tensor(value)


def is_average(key: str) -> bool:
    """Return whether what is saved under a key is an average of the weights, by the words in the key."""
    return any(word in _AVERAGES for word in key.lower().replace("-", "_").split("_"))


def read_parameter_states(optimizer: Mapping[str, Any], parent: Mapping[Any, Any] = {}) -> list[ParameterState]:
    """Return the parameters of an optimizer's state dictionary in its order.

    Args:
        optimizer: its state dictionary.
        parent: the dictionary that contains it: masters may be saved next to the optimizer.
    """
    entries = [
        (key, group_index, group, _item(group.get("param_names"), index))
        for group_index, group in enumerate(optimizer["param_groups"])
        for index, key in enumerate(group["params"])
    ]
    masters = _find_masters(optimizer, len(entries)) or _find_masters(parent, len(entries))
    return [
        ParameterState(
            key=key,
            group=group_index,
            options={option: value for option, value in group.items() if option not in {"params", "param_names"}},
            state={
                str(state_name): _as_array(value)
                for state_name, value in _state_of(optimizer, key).items()
                if isinstance(value, (Tensor, StoredArray))
            },
            step_count=read_step_count(_state_of(optimizer, key).get("step", group.get("step"))),
            master=masters[index] if masters else None,
            name=name if name is not None else (key if isinstance(key, str) else None),
        )
        for index, (key, group_index, group, name) in enumerate(entries)
    ]


def optimizer_kind(optimizer: Sequence[ParameterState]) -> str:
    """Return the class of an optimizer as far as its options tell: no state dictionary names it."""
    options = optimizer[0].options if optimizer else {}
    if _is_of_bitsandbytes(optimizer):
        return "optimizer of bitsandbytes"
    if not has_known_arithmetic(optimizer):
        return "optimizer"
    kind = next((kind for option, kind in _KINDS.items() if option in options), "optimizer")
    return "AdamW" if kind.startswith("Adam or") and options.get("decoupled_weight_decay") else kind


def has_known_arithmetic(optimizer: Sequence[ParameterState]) -> bool:
    """Return whether an optimizer keeps no masters and compensates no rounding but by state of the usual names."""
    by_options = not optimizer or any(option in optimizer[0].options for option in _KINDS.keys() - _SHARED)
    return by_options or _is_of_bitsandbytes(optimizer)


def _is_of_bitsandbytes(optimizer: Sequence[ParameterState]) -> bool:
    return any(_OF_BITSANDBYTES in parameter.state for parameter in optimizer)


def weight_decay_groups(optimizer: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return (weight decay, number of tensors) of each parameter group."""
    return [(float_or_none(group.get("weight_decay")) or 0.0, len(group["params"])) for group in optimizer["param_groups"]]


def _state_of(optimizer: Mapping[str, Any], key: int | str) -> Mapping[str, Any]:
    state = optimizer["state"].get(key, {})
    if not isinstance(state, Mapping):
        return {}
    nested = [value for value in state.values() if isinstance(value, Mapping)]  # bitsandbytes keeps quantised state so
    return {name: value for values in (state, *nested) for name, value in values.items()}


def _find_masters(mapping: Mapping[Any, Any], count: int) -> list[StoredArray] | None:
    for key, value in mapping.items():
        if isinstance(key, str) and any(word in key.lower() for word in _MASTER_WORDS):
            tensors = list(_flatten_tensors(value))
            if len(tensors) == count and count and all(map(is_plain, tensors)):
                return [describe_tensor(tensor) for tensor in tensors]
    return None


def _flatten_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten_tensors(item)


def read_step_count(value: object) -> float | None:
    """Return an optimizer's step count, from a number or a tensor with one element; None from anything else."""
    if isinstance(value, StoredArray):
        value = value.read()
    count = None if isinstance(value, Tensor) and value.is_complex() else float_or_none(value)
    return count if count is not None and isfinite(count) else None


def _item(sequence: object, index: int) -> Any:
    return sequence[index] if isinstance(sequence, (list, tuple)) and index < len(sequence) else None
