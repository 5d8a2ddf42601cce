"""Validation of presets into typed configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchbox.registry.contracts import Axes

FORBID_EXTRA = ConfigDict(extra="forbid")

Probability = Annotated[float, Field(ge=0, le=1)]

T = TypeVar("T")
P = TypeVar("P")


def builder(policy: Callable[[T, Axes], P], config: type[T]) -> Callable[[Mapping[str, Any], Axes], P]:
    """Return the `build` function of a policy's module, which builds it in float32 on torch's default device.

    It raises `ConfigurationError` when the preset does not validate as `config`, a pydantic dataclass.
    """
    return lambda preset, axes: policy(parse_preset(config, preset), axes)


def parse_preset(cls: type[T], preset: Mapping[str, Any]) -> T:
    """Validate the preset as an instance of `cls`, a pydantic dataclass.

    Raises:
        ConfigurationError: a key is unknown, missing or of the wrong type. The error lists all of them.
    """
    try:
        return TypeAdapter(cls).validate_python(preset)
    except ValidationError as error:
        problems = [Problem(f"preset.{'.'.join(map(str, detail['loc']))}", detail["msg"]) for detail in error.errors()]
        raise ConfigurationError(problems) from None
