"""Types of the values in a matrix, for pydantic: the one place that says what a value may be.

Types are strict (no `"2"` for 2, no `1` for true), and an unknown name is refused with the nearest known one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from benchbox.errors import DataError
from benchbox.registry.backends import BUILT_IN_BACKENDS, backends
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.metrics import BUILT_IN_METRICS, metrics
from benchbox.registry.names import did_you_mean
from benchbox.registry.orders import ORDERS
from benchbox.registry.recipes import BUILT_IN_RECIPES, recipes
from benchbox.registry.weights import weight_files

if TYPE_CHECKING:
    from benchbox.registry.policies import PolicyEntry

_BYTE_UNITS = {
    unit + suffix: base**power for power, unit in enumerate("KMGT", 1) for suffix, base in (("B", 1000), ("iB", 1024))
}
_BYTES = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_BYTE_UNITS)})")

_NO_SHARE = 1e6  # a typing error, as one of 400 digits, which is no finite number

# The default of keys that may be absent. A default is not validated, so a null in the file is an error all the same.
ABSENT: Any = None


class Strict(BaseModel):
    """Base of every mapping in a matrix: no unknown keys, no conversions, attribute docstrings become editor hints."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, hide_input_in_errors=True
    )


def refusal(message: str, hint: str | None = None) -> PydanticCustomError:
    """Return an error to raise in a validator; `spec.problems` prints its message and hint unchanged."""
    # The texts travel as context, because pydantic would read braces in them as a template.
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint})


def check_name(kind: str, name: str, names: Iterable[str]) -> str:
    """Return the name if it is one of `names`; refuse it with the nearest one otherwise."""
    if name not in names:
        raise refusal(f"unknown {kind} {name!r}", did_you_mean(name, names))
    return name


def _check_policy(name: str, info: ValidationInfo) -> str:
    return check_name("policy", name, _available_policies(info))


def _check_size(name: str, info: ValidationInfo) -> str:
    # Some policy must have it; whether the policy of the same cell has it is checked when the cells are made.
    return check_name("size", name, {size for entry in _available_policies(info).values() for size in entry.presets})


def _available_policies(info: ValidationInfo) -> Mapping[str, PolicyEntry]:
    """Return the policies that the matrix may name: the validation context holds them, because `--policy-dir` adds to them."""
    assert info.context is not None
    policies: Mapping[str, PolicyEntry] = info.context["policies"]
    return policies


def reject_search(value: Any) -> Any:
    """Return the value unless it is `{search: max}`, which only the axis `batch` may be."""
    if isinstance(value, Mapping) and "search" in value:
        raise refusal("only the axis batch can be searched", "under axes, write batch: {search: max}")
    return value


def _parse_fraction(value: Any) -> Any:
    """Read `5%` or 0.05. A bare 5 is more likely 5% than 500%, and is refused."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 1:
        if value >= _NO_SHARE:
            raise refusal("is no fraction", "write 5% or 0.05")
        raise refusal(
            f"{value:g} is {100 * value:g}%", f"write {value:g}% or {value / 100:g}, and {100 * value:g}% if that is meant"
        )
    if not isinstance(value, str):
        return value
    try:
        share = float(value[:-1] if value.endswith("%") else "not a percentage") / 100
    except ValueError:
        share = math.inf
    if share >= _NO_SHARE:
        raise refusal(f"{value!r} is not a fraction", "write 5% or 0.05")
    return share


def _read_bytes(value: Any) -> Any:
    """Read `40 GiB`, `512 MiB` or a number of bytes."""
    if not isinstance(value, str):
        return value
    amount = parse_bytes(value)
    if amount is None:
        raise refusal(f"{value!r} is not an amount of memory", "write it as in 40 GiB, 512 MiB, 1.5 GB, or as bytes")
    return amount


def parse_bytes(text: str) -> int | None:
    """Return the bytes of an amount such as `40 GiB` or `1.5GB`; None if it is none."""
    match = _BYTES.fullmatch(text)
    amount = math.inf if match is None else float(match[1]) * _BYTE_UNITS[match[2]]
    return round(amount) if math.isfinite(amount) else None


def _check_weights(path: str) -> str:
    try:
        weight_files(Path(path))
    except DataError as error:
        raise refusal(f"weights: {error}", "name a safetensors file, or a folder of them") from None
    return path


def _suggest(names: Iterable[str]) -> WithJsonSchema:
    """Return the schema with which an editor offers the built-in names and accepts any other: entry points may add some."""
    return WithJsonSchema({"anyOf": [{"enum": sorted(names)}, {"type": "string"}]})


# Of a number `_parse_fraction` takes less than 1; a text has no bound.
_FRACTION_SCHEMA = WithJsonSchema({"type": ["number", "string"], "minimum": 0, "exclusiveMaximum": 1})
Count = Annotated[int, Field(ge=1, le=1_000_000)]
ShardSize = Annotated[int, Field(ge=2, le=1_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Fraction = Annotated[float, BeforeValidator(_parse_fraction), Field(ge=0), _FRACTION_SCHEMA]
ByteCount = Annotated[int, BeforeValidator(_read_bytes), Field(ge=1, lt=2**53), WithJsonSchema({"type": ["integer", "string"]})]
PolicyName = Annotated[str, AfterValidator(_check_policy)]
Size = Annotated[str, AfterValidator(_check_size)]
BackendName = Annotated[str, AfterValidator(lambda name: check_name("backend", name, backends())), _suggest(BUILT_IN_BACKENDS)]
RecipeName = Annotated[str, AfterValidator(lambda name: check_name("recipe", name, recipes())), _suggest(BUILT_IN_RECIPES)]
FreezeName = Annotated[
    str,
    AfterValidator(lambda name: check_name("freeze preset", name, FREEZE_PRESETS)),
    WithJsonSchema({"enum": list(FREEZE_PRESETS)}),
]
OrderName = Annotated[
    str, AfterValidator(lambda name: check_name("order", name, ORDERS)), WithJsonSchema({"enum": list(ORDERS)})
]
MetricName = Annotated[str, AfterValidator(lambda name: check_name("metric", name, metrics())), _suggest(BUILT_IN_METRICS)]
WeightsPath = Annotated[str, Field(min_length=1), AfterValidator(_check_weights)]
Batch = Annotated[Count, BeforeValidator(reject_search)]
