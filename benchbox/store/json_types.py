"""Values read from JSON against the types that are declared for them: typed dictionaries, lists, mappings and unions."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

_NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}


def type_problem(value: Any, declared: Any, key: str = "") -> str | None:
    """Return where a value differs from its declared type, such as `memory.worst: a list, and an object is expected`.

    Keys that are not declared are no problem.

    Args:
        value: as read from JSON.
        declared: a type of JSON, `Any`, or a union, list, mapping or `TypedDict` of declared types.
        key: of the value, for the answer.

    Returns:
        The first problem, or None.
    """
    return None if _acceptor(declared)(value) else _describe_problem(value, declared, key)


@cache
def _acceptor(declared: Any) -> Callable[[Any], bool]:
    """Return a function that is true of values that have the declared type, and in doubt false.

    A record has thousands of values, and a run thousands of records: the reason is sought only where something is wrong.
    """
    plain = _plain_types(declared)
    if declared is Any:
        return lambda _: True
    if plain is not None:
        return lambda value: type(value) in plain
    origin, arguments = get_origin(declared) or declared, get_args(declared)
    if origin in (Union, types.UnionType):
        options = [_acceptor(option) for option in arguments]
        return lambda value: any(accepts(value) for accepts in options)
    if is_typeddict(declared):
        required, fields = _required_keys(declared), [(name, _acceptor(hint)) for name, hint in _hints(declared).items()]
        return lambda value: (
            type(value) is dict
            and required <= value.keys()
            and all(accepts(value[name]) for name, accepts in fields if name in value)
        )
    if origin in (dict, Mapping):
        accepts_item = _acceptor_of_all(arguments[1] if arguments else Any)
        return lambda value: type(value) is dict and accepts_item(value.values())
    if origin in (list, Sequence):
        accepts_item = _acceptor_of_all(arguments[0] if arguments else Any)
        return lambda value: type(value) is list and accepts_item(value)
    return lambda _: False


def _acceptor_of_all(declared: Any) -> Callable[[Iterable[Any]], bool]:
    """Return the acceptor of several values of one declared type."""
    plain, accepts = _plain_types(declared), _acceptor(declared)
    return (lambda values: all(map(accepts, values))) if plain is None else (lambda values: plain.issuperset(map(type, values)))


def _plain_types(declared: Any) -> frozenset[type] | None:
    """Return the types that a declared type allows if they are all text, numbers, truth values or null."""
    options = get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)
    if not all(option in _NAMES for option in options):
        return None
    return frozenset(options) | (frozenset((int,)) if float in options else frozenset())


def _describe_problem(value: Any, declared: Any, key: str) -> str | None:
    if declared is Any:
        return None
    options = get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)
    candidates = [option for option in options if _is_instance(value, option)]
    if not candidates:
        expected = " or ".join(dict.fromkeys(map(_name, options)))
        return f"{key}: {_name(type(value))}, and {expected} is expected"
    if len(candidates) > 1:
        return None  # only plain values have several
    return _problem_inside(value, candidates[0], key)


def _problem_inside(value: Any, declared: Any, key: str) -> str | None:
    items: list[tuple[Any, Any, str]] = []
    if is_typeddict(declared):
        hints = _hints(declared)
        if missing := sorted(_required_keys(declared) - value.keys()):
            return f"{key}: missing {', '.join(missing)}" if key else f"missing {', '.join(missing)}"
        items = [(value[name], hint, f"{key}.{name}" if key else name) for name, hint in hints.items() if name in value]
    elif isinstance(value, dict):
        item_type = get_args(declared)[1] if get_args(declared) else Any
        items = [(item, item_type, f"{key}.{name}" if key else name) for name, item in value.items()]
    elif isinstance(value, list | tuple):
        item_type = get_args(declared)[0] if get_args(declared) else Any
        items = [(item, item_type, f"{key}[{index}]") for index, item in enumerate(value)]
    problems = (_describe_problem(*item) for item in items)
    return next((problem for problem in problems if problem), None)


@cache
def _hints(declared: Any) -> dict[str, Any]:
    return get_type_hints(declared)


@cache
def _required_keys(declared: Any) -> set[str]:
    hints = get_type_hints(declared, include_extras=True)  # where annotations are texts, __required_keys__ misses NotRequired
    return {name for name in declared.__required_keys__ if get_origin(hints[name]) is not NotRequired}


def _is_instance(value: Any, declared: Any) -> bool:
    origin = get_origin(declared) or declared
    if declared is Any:
        return True
    if is_typeddict(declared) or origin in (dict, Mapping):
        return isinstance(value, dict)
    if origin in (list, Sequence):
        return isinstance(value, list | tuple)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin)


def _name(declared: Any) -> str:
    origin = get_origin(declared) or declared
    if is_typeddict(declared) or origin in (dict, Mapping):
        return "an object"
    if origin in (list, tuple, Sequence):
        return "a list"
    return _NAMES.get(origin, str(origin))
