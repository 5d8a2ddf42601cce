"""What each field of a matrix may hold, as pydantic types: the one place that says so.

Types are strict (no `"2"` for 2, no `1` for true), and a name that is not known answers with what was probably meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from benchbox.registry.backends import backends
from benchbox.registry.freezing import FREEZES
from benchbox.registry.metrics import METRICS
from benchbox.registry.names import did_you_mean
from benchbox.registry.recipes import RECIPES

if TYPE_CHECKING:
    from benchbox.registry.policies import PolicyEntry

# The default of fields that need not be given. A default is not validated, so a null in the file is an error all the same.
ABSENT: Any = None


class Strict(BaseModel):
    """Base of every mapping in a matrix: no unknown keys, no conversions, attribute docstrings become editor hints."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, hide_input_in_errors=True
    )


def refuse(message: str, hint: str | None = None) -> PydanticCustomError:
    """An error to raise in a validator; `spec.problems` prints it as it is."""
    # The texts travel as context, because pydantic would read braces in them as a template.
    return PydanticCustomError("refused", "{message}", {"message": message, "hint": hint})


def known(kind: str, name: str, names: Iterable[str]) -> str:
    """The name, when it is one of `names`; refused with the nearest one otherwise."""
    if name not in names:
        raise refuse(f"unknown {kind} {name!r}", did_you_mean(name, names))
    return name


def _policy(name: str, info: ValidationInfo) -> str:
    return known("policy", name, policies_of(info))


def _size(name: str, info: ValidationInfo) -> str:
    # Some policy must have it; that the policy beside it has it is seen when the points are made.
    return known("size", name, {size for entry in policies_of(info).values() for size in entry.presets})


def policies_of(info: ValidationInfo) -> Mapping[str, PolicyEntry]:
    """The policies that the matrix may name; given as validation context, because `--policy-dir` adds to them."""
    found: Mapping[str, PolicyEntry] = (info.context or {}).get("policies", {})
    return found


def searched(value: Any) -> Any:
    """The value, unless it is `{search: max}`."""
    if isinstance(value, Mapping) and "search" in value:
        raise refuse("searching the largest batch is not there yet", "give a list, such as [1, 2, 4]")
    return value


def _fraction(value: Any) -> Any:
    """`5%` or 0.05."""
    if not isinstance(value, str):
        return value
    try:
        return float(value[:-1] if value.endswith("%") else "not a percentage") / 100
    except ValueError:
        raise refuse(f"{value!r} is not a fraction", "write 5% or 0.05") from None


def _completed_by_names(names: Iterable[str]) -> WithJsonSchema:
    # An editor offers the built-in names and accepts any other, since entry points may add some.
    return WithJsonSchema({"anyOf": [{"enum": sorted(names)}, {"type": "string"}]})


Count = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, BeforeValidator(_fraction), Field(ge=0), WithJsonSchema({"type": ["number", "string"]})]
Policy = Annotated[str, AfterValidator(_policy)]
Size = Annotated[str, AfterValidator(_size)]
Backend = Annotated[str, AfterValidator(lambda name: known("backend", name, backends())), _completed_by_names(backends())]
Recipe = Annotated[str, AfterValidator(lambda name: known("recipe", name, RECIPES)), WithJsonSchema({"enum": list(RECIPES)})]
Freeze = Annotated[
    str, AfterValidator(lambda name: known("freeze preset", name, FREEZES)), WithJsonSchema({"enum": list(FREEZES)})
]
MetricName = Annotated[
    str, AfterValidator(lambda name: known("metric", name, METRICS)), WithJsonSchema({"enum": list(METRICS)})
]
Batch = Annotated[Count, BeforeValidator(searched)]


class Point(Strict):
    """Some of the fields of a cell: what the top level, a point of a zipped axis, `include`, `exclude` and `where` hold."""

    policy: Policy = ABSENT
    """The policy: a folder of `policies/`."""
    size: Size = ABSENT
    """A preset of the policy: tiny, small, full."""
    backend: Backend = ABSENT
    """Who shards and reduces."""
    world_size: Count = ABSENT
    """Ranks of a process group."""
    batch: Batch = ABSENT
    """Samples a rank and micro-step."""
    cams: Count = ABSENT
    """Cameras of every sample."""
    attention: Literal["eager", "sdpa", "flex"] = ABSENT
    """How attention is computed; flex needs a GPU."""
    checkpointing: bool = ABSENT
    """Whether activations are recomputed in the backward pass."""
    recipe: Recipe = ABSENT
    """The precision recipe."""
    freeze: Freeze = ABSENT
    """Which parts of the policy train: full is all of it."""
    weights: Annotated[str, Field(min_length=1)] = ABSENT
    """Published weights to start from: a safetensors file or a folder of them."""
    accumulation: Count = ABSENT
    """Micro-steps an optimizer step."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = ABSENT
    """Of parameters and data order."""

    def given(self) -> dict[str, Any]:
        """The fields that are in the file."""
        return {name: getattr(self, name) for name in Point.model_fields if name in self.model_fields_set}
