"""Placeholders for what a checkpoint contains beside tensors, plain containers and their types: nothing of it is imported."""

from __future__ import annotations

import pickle
import sys
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchbox.observer.introspect.tensors import QUANTISED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Modules of the standard library, also by their names in pickles for Python 2.
_STDLIB_MODULES = sys.stdlib_module_names | IMPORT_MAPPING.keys()
# Types of the standard library whose objects are data: to make one runs nothing of the file. Whole modules would be too many:
# `pathlib.os` is a module that a pickle can name, too. torch lists the names as they are in Python 3.
_DATA_TYPES = {
    "_operator": ("getitem",),  # of `Optional[int]`
    "argparse": ("Namespace",),
    "builtins": (
        "Ellipsis",
        "bool",
        "bytearray",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "getattr",
        "int",
        "list",
        "object",
        "range",
        "set",
        "slice",
        "str",
        "tuple",
        "type",
    ),
    "collections": ("ChainMap", "Counter", "OrderedDict", "UserDict", "UserList", "UserString", "defaultdict", "deque"),
    "copyreg": ("_reconstructor",),  # makes instances
    "datetime": ("date", "datetime", "time", "timedelta", "timezone"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "functools": ("partial",),  # calls nothing; the function in it has a name of its own
    **dict.fromkeys(
        ("pathlib", "pathlib._local"),  # the second since Python 3.13
        ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"),
    ),
    "types": ("GenericAlias", "SimpleNamespace"),
    "uuid": ("SafeUUID", "UUID"),
}
_DATA_NAMES = frozenset(f"{module}.{name}" for module, names in _DATA_TYPES.items() for name in names)


def is_code(name: str) -> bool:
    """Return whether only a program would contain this name: one of the standard library that is no type of data.

    It would not be called here in any case, but a file with such a name is no checkpoint.
    """
    module, _, last = name.partition(".")
    if name.startswith("collections.abc."):
        module, last = "typing", last.removeprefix("abc.")
    if module == "typing":  # its types begin with a capital, its functions do not
        return not last.isidentifier() or not last.lstrip("_")[:1].isupper()
    return module in _STDLIB_MODULES and name not in _DATA_NAMES


class PlaceholderObject:
    """Placeholder for an object of another class; keeps nothing of it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore all arguments."""

    def __setstate__(self, _: Any) -> None:
        """Ignore the state."""


class QuantisedPlaceholder(Tensor):
    """Placeholder for a tensor of torchao's quantised optimizer state: its shape, and the tensors that it consists of."""

    def __setstate__(self, state: Any) -> None:
        """Keep the tensors of the state as attributes."""
        if isinstance(state, dict):
            vars(self).update({name: value for name, value in state.items() if isinstance(value, Tensor)})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Return the names of the attributes that are tensors, as torchao's own classes do."""
        return list(vars(self)), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Refuse every operation."""
        raise NotImplementedError(f"{func} of a placeholder")


class _PlaceholderMapping:
    """Class whose instances are plain: torch fills no other dictionaries than these."""

    def __new__(cls, *_: Any, **__: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


class _PlaceholderList:
    """Class whose instances are plain lists."""

    def __new__(cls, *_: Any, **__: Any) -> list[Any]:  # type: ignore[misc]
        return []


def _type_of(*values: Any) -> PlaceholderObject:
    """Stand for `type(value)`. Three arguments would make a class."""
    if len(values) != 1:
        raise pickle.UnpicklingError("a class that the file defines")
    return PlaceholderObject()


def _attribute(owner: Any, name: Any) -> type:
    """Stand for a nested class or a member of an enumeration: for an attribute of a class of another library."""
    is_foreign = isinstance(owner, type) and issubclass(owner, PlaceholderObject) and owner is not PlaceholderObject
    if is_foreign and isinstance(name, str) and not name.startswith("__"):
        return owner  # type: ignore[no-any-return]
    raise pickle.UnpicklingError("an attribute of an object that is not data")


_STAND_INS: dict[str, Any] = {
    "builtins.getattr": _attribute,
    "builtins.type": _type_of,
    "collections.defaultdict": _PlaceholderMapping,
    "collections.deque": _PlaceholderList,
}
# What torch says of an object that a file wants to fill as a dictionary or a list, and what can be filled instead.
_CONTAINERS = {
    "Can only SETITEM": _PlaceholderMapping,
    "Can only append": _PlaceholderList,
    "Can only extend": _PlaceholderList,
}


class Placeholders:
    """Placeholders for the names in a file that torch does not load by itself."""

    def __init__(self, names: Iterable[str]) -> None:
        self._by_name = {name: _STAND_INS.get(name) or _placeholder(name, index) for index, name in enumerate(names)}

    def pairs(self) -> list[Callable[..., Any] | tuple[Callable[..., Any], str]]:
        """Return (placeholder, name) as torch's `safe_globals` takes them."""
        return [(placeholder, name) for name, placeholder in self._by_name.items()]

    def make_container(self, error: BaseException | None) -> bool:
        """Replace the placeholder that torch refused to fill by a plain container; return whether there was one.

        That a class is one of dictionaries or of lists shows only when its objects are filled.
        """
        message = str(error)
        container = next((kind for prefix, kind in _CONTAINERS.items() if prefix in message), None)
        refused = next((name for name, placeholder in self._by_name.items() if f"got {placeholder}" in message), None)
        if container is None or refused is None or self._by_name[refused] is PlaceholderObject:
            return False
        self._by_name[refused] = container
        return True


def _placeholder(name: str, index: int) -> type:
    """Return a placeholder of its own for a name of another library. Those of the standard library share one."""
    if name.split(".")[0] in _STDLIB_MODULES:
        return PlaceholderObject
    if (last := name.rsplit(".", 1)[-1]) in QUANTISED:
        return type(last, (QuantisedPlaceholder,), {})
    return type(f"Placeholder{index}", (PlaceholderObject,), {})
