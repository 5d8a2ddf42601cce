"""Presets to typed configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchbox.registry.contracts import Axes

FORBID_EXTRA = ConfigDict(extra="forbid")

T = TypeVar("T")
P = TypeVar("P")


def builder(policy: Callable[[T, Axes], P], config: type[T]) -> Callable[[Mapping[str, Any], Axes], P]:
    """The `build` of a policy's module: the policy of a preset, in float32 on torch's default device.

    It raises `ConfigurationError` when the preset is none of `config`, a pydantic dataclass.
    """
    return lambda preset, axes: policy(read(config, preset), axes)


def read(cls: type[T], preset: Mapping[str, Any]) -> T:
    """The preset as an instance of `cls`, a pydantic dataclass.

    Raises:
        ConfigurationError: a key is unknown, missing or of the wrong type; all of them at once.
    """
    try:
        return TypeAdapter(cls).validate_python(preset)
    except ValidationError as error:
        problems = [Problem(f"preset.{'.'.join(map(str, wrong['loc']))}", wrong["msg"]) for wrong in error.errors()]
        raise ConfigurationError(problems) from None
