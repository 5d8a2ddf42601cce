"""Locations in the training's code where optimizers and schedules are constructed, and where weights are cast to 16 bits."""

from __future__ import annotations

import sys
import sysconfig
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..facts import SourceLocation
from ..introspect.tensors import dtype_name
from .patches import FunctionPatches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from types import FrameType

_CASTS = ("to", "type", "half", "bfloat16", "float", "double", "cpu", "cuda")
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)
_MAX_CALLS = 8
_MAX_CASTS = 64
_TORCH = str(Path(torch.__file__).parent)
_OBSERVER = str(Path(__file__).parent.parent)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")


class _Call(NamedTuple):
    file: str
    line: int
    function: str

    @property
    def is_installed(self) -> bool:
        """True for the code of a package, False for that of the user."""
        return self.file.startswith((_STANDARD_LIBRARY, "<")) or any(folder in Path(self.file).parts for folder in _INSTALLED)


class _Record(NamedTuple):
    instance: weakref.ref[Any]
    location: SourceLocation


class LocationRecorder:
    """Records, while installed, the calls that construct optimizers and schedules, and those that cast modules to 16 bits.

    What cannot be recorded has no location: no failure of this class reaches the training, and no judgement depends on it.
    """

    def __init__(self) -> None:
        self._patches = FunctionPatches()
        self._constructed: dict[int, _Record] = {}  # by id: an optimizer need not be hashable
        self._casts: list[_Record] = []
        self._default_dtypes: dict[SourceLocation, None] = {}
        self.before_conversion: Callable[[nn.Module], None] = lambda _: None  # called before a module is cast or moved

    def install(self) -> None:
        """Start recording."""
        self._patches = FunctionPatches()
        self._patches.patch(Optimizer, "__init__", self._construct_optimizer)
        self._patches.patch(LRScheduler, "__init__", self._construct_schedule)
        for name in _CASTS:
            self._patches.patch(nn.Module, name, self._cast)
        self._patches.patch(torch, "set_default_dtype", self._set_default_dtype)

    def remove(self) -> None:
        """Stop recording."""
        self._patches.remove()

    def constructed(self) -> list[Any]:
        """Return the optimizers and schedules whose construction was seen, and that are still there."""
        return [instance for record in self._constructed.values() if (instance := record.instance()) is not None]

    def locations(self, constructed: Iterable[Any], models: Sequence[nn.Module]) -> Iterator[SourceLocation]:
        """Yield the locations of these optimizers and schedules, and of the casts of modules in these models.

        Where none of these was cast, it yields the locations that made a 16-bit dtype the default for new modules instead.
        """
        records = [self._constructed.get(id(instance)) for instance in constructed]
        constructions = {record.location: None for record in records if record is not None and record.instance() is not None}
        parts = {id(module) for model in models for module in model.modules()}
        casts = {cast.location: None for cast in self._casts if id(cast.instance()) in parts}
        yield from [*constructions, *(casts or self._default_dtypes)]

    def _construct_optimizer(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._construct("optimizer", original, optimizer, *args, **kwargs)

    def _construct_schedule(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
        self._construct("schedule", original, schedule, *args, **kwargs)

    def _construct(self, kind: str, original: Any, instance: Any, *args: Any, **kwargs: Any) -> None:
        original(instance, *args, **kwargs)
        with suppress(Exception):
            if (location := _calling_location(kind, type(instance).__name__, instance)) is not None:
                self._constructed[id(instance)] = _Record(weakref.ref(instance), location)

    def _cast(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before: list[torch.dtype] = []
        with suppress(Exception):
            before = [tensor.dtype for tensor in _stored_tensors(module)]
            if _changes_anything(original.__name__, module, *args, **kwargs):
                self.before_conversion(module)
        result = original(module, *args, **kwargs)
        with suppress(Exception):
            self._record_cast(module, before)
        return result

    def _record_cast(self, module: nn.Module, before: Sequence[torch.dtype]) -> None:
        changed = {
            tensor.dtype: dtype_name(tensor)
            for tensor, dtype in zip(_stored_tensors(module), before, strict=False)
            if tensor.dtype != dtype
        }
        if not changed:
            return
        replaced = {id(None), *(id(part) for part in module.modules())}  # casts of these, and of modules that are gone
        self._casts = [cast for cast in self._casts if id(cast.instance()) not in replaced]
        for dtype, name in changed.items():
            location = _calling_location("cast", f"{type(module).__name__} to {name}")
            if dtype in _SIXTEEN_BIT and location is not None and len(self._casts) < _MAX_CASTS:
                self._casts.append(_Record(weakref.ref(module), location))

    def _set_default_dtype(self, original: Callable[..., Any], dtype: Any) -> Any:
        result = original(dtype)
        with suppress(Exception):
            name = str(dtype).removeprefix("torch.")
            location = _calling_location("default dtype", name) if dtype in _SIXTEEN_BIT else None
            if location is not None and len(self._default_dtypes) < _MAX_CASTS:
                self._default_dtypes[location] = None
        return result


def _changes_anything(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Return whether a call of a module's method of this name casts or moves one of its tensors."""
    device: torch.device | None = None
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32, "double": torch.float64}.get(name)
    if name == "to":
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # noqa: SLF001 (as Module.to does)
    elif name == "type":
        dtype = args[0] if args else kwargs["dst_type"]
        if not isinstance(dtype, torch.dtype):  # the name of a type of tensors
            return True
    elif dtype is None:
        device = torch.device(name) if name in ("cpu", "cuda") else None
    return any(
        (device is not None and tensor.device.type != device.type)
        or (dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype)
        for tensor in _stored_tensors(module)
    )


def _stored_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _calling_location(kind: str, name: str, constructed: Any = None) -> SourceLocation | None:
    """Return the location of the running call: the innermost line of the user's code, or of any outside of torch.

    The constructor of the constructed object is no such location: it constructs its base class.
    """
    calls = list(_outer_calls(sys._getframe(2), constructed))  # noqa: SLF001 (`inspect` reads every source file)
    if not calls:
        return None
    caller = next((call for call in calls if not call.is_installed), calls[0])
    stack = tuple(f"{call.file}:{call.line} in {call.function}" for call in calls[:_MAX_CALLS])
    return SourceLocation(kind=kind, name=name, file=caller.file, line=caller.line, function=caller.function, stack=stack)


def _outer_calls(frame: FrameType | None, constructed: Any) -> Iterator[_Call]:
    while frame is not None:
        code = frame.f_code
        is_own = constructed is not None and code.co_name == "__init__" and frame.f_locals.get("self") is constructed
        if not is_own and not code.co_filename.startswith((_TORCH, _OBSERVER, "<frozen")):
            yield _Call(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
