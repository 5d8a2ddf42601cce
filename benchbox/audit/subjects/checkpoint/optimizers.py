"""State dictionaries: which dictionaries are optimizers and which are models, told by their shape and not by their key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchbox.audit.subjects.checkpoint.stored import StoredArray, held
from benchbox.observer.introspect.names import own_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_DEPTH = 5
# Words in the keys that masters are saved under: benchbox's `masters`, Megatron's `fp32_from_fp16_params`, apex's
# `fp32_from_fp16`, DeepSpeed's `fp32_groups_flat`.
_MASTER_WORDS = ("master", "fp32")
# An average of the weights is no model that was stepped.
_AVERAGES = ("ema", "shadow", "swa")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """One parameter as an optimizer's state dictionary has it: by number or by name, with its state and its group's options."""

    key: int | str
    group: int
    options: Mapping[str, Any]
    state: Mapping[str, StoredArray]
    step_count: float | None
    master: StoredArray | None = None
    name: str | None = None  # where the dictionary holds names

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Of the tensor that was stepped, as far as its master or its state tells; None of one without state."""
        if self.master is not None:
            return self.master.shape
        return next((value.shape for value in self.state.values() if value.shape), None)


def is_optimizer_state(value: object) -> bool:
    """Whether this is what `Optimizer.state_dict` gives."""
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("state"), Mapping)
        and isinstance(value.get("param_groups"), Sequence)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
    )


def is_model_state(value: object) -> bool:
    """Whether this is what `Module.state_dict` gives: names, and tensors of which some are floating."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    tensors = [each for each in value.values() if isinstance(each, Tensor)]
    extra = sum(not isinstance(each, Tensor) and not name.endswith("_extra_state") for name, each in value.items())
    return not extra and any(tensor.is_floating_point() and tensor.ndim for tensor in tensors)


def walk_mappings(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Every dictionary in what was saved, and the way to it. Optimizers and models are not gone into."""
    if isinstance(value, Mapping):
        yield path, value
        if is_optimizer_state(value) or is_model_state(value):
            return
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(place), each) for place, each in enumerate(value)]
    else:
        return
    if len(path) < _DEPTH:
        for key, each in items:
            yield from walk_mappings(each, (*path, key))


def collect_models(value: object) -> dict[str, StoredArray]:
    """The tensors of all models, without averages of them. Of several models the names begin with the key of theirs."""
    found = {
        path: each for path, each in walk_mappings(value) if is_model_state(each) and not any(_is_average(key) for key in path)
    }
    return merge_models({".".join(path): each for path, each in found.items()})


def merge_models(models: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredArray]:
    """Tensors by the names they had before wrapping; where there are several models, begun with a label of the model."""
    several = len(models) > 1
    return {
        f"{label}.{own_name(name)}" if several else own_name(name): value if isinstance(value, StoredArray) else held(value)
        for label, model in models.items()
        for name, value in model.items()
        if isinstance(value, (Tensor, StoredArray))
    }


def _is_average(key: str) -> bool:
    return any(word in _AVERAGES for word in key.lower().replace("-", "_").split("_"))


def read_parameter_states(optimizer: Mapping[str, Any], beside: Mapping[Any, Any] = {}) -> list[ParameterState]:
    """The parameters of an optimizer's state dictionary, in its order."""
    numbered = [
        (key, place, group, _at(group.get("param_names"), index))
        for place, group in enumerate(optimizer["param_groups"])
        for index, key in enumerate(group["params"])
    ]
    masters = _masters(optimizer, len(numbered)) or _masters(beside, len(numbered))
    return [
        ParameterState(
            key=key,
            group=place,
            options={option: each for option, each in group.items() if option not in {"params", "param_names"}},
            state={
                str(name): each if isinstance(each, StoredArray) else held(each)
                for name, each in _state_of(optimizer, key).items()
                if isinstance(each, (Tensor, StoredArray))
            },
            step_count=_count(_state_of(optimizer, key).get("step", group.get("step"))),
            master=masters[index] if masters else None,
            name=name if name is not None else (key if isinstance(key, str) else None),
        )
        for index, (key, place, group, name) in enumerate(numbered)
    ]


def optimizer_kind(optimizer: Sequence[ParameterState]) -> str:
    """What the options tell of the class, which no state dictionary names."""
    options = optimizer[0].options if optimizer else {}
    if "betas" in options and "eps" in options:
        return "AdamW" if options.get("decoupled_weight_decay") else "Adam or AdamW"
    return "SGD" if "nesterov" in options else "optimizer"


def weight_decay_groups(optimizer: Mapping[str, Any]) -> list[tuple[float, int]]:
    """(weight decay, tensors) of each parameter group."""
    return [(float(group.get("weight_decay") or 0.0), len(group["params"])) for group in optimizer["param_groups"]]


def _state_of(optimizer: Mapping[str, Any], key: int | str) -> Mapping[str, Any]:
    state = optimizer["state"].get(key, {})
    return state if isinstance(state, Mapping) else {}


def _masters(holder: Mapping[Any, Any], count: int) -> list[StoredArray] | None:
    for key, value in holder.items():
        if isinstance(key, str) and any(word in key.lower() for word in _MASTER_WORDS):
            tensors = list(_tensors(value))
            if len(tensors) == count and count:
                return [held(tensor) for tensor in tensors]
    return None


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _count(value: object) -> float | None:
    """An optimizer's step count, from a number or a tensor of one."""
    if isinstance(value, StoredArray):
        value = value.read()
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _at(found: object, index: int) -> Any:
    return found[index] if isinstance(found, (list, tuple)) and index < len(found) else None
