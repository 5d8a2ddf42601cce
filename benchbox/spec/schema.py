"""The matrix file as pydantic models: what `matrices/schema.json` is generated from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, create_model, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from benchbox.registry.metrics import METRICS
from benchbox.spec.cell import DataSpec, MeasureSpec, OptimSpec
from benchbox.spec.fields import ABSENT, Count, Fraction, MetricName, Point, Strict, known, refuse, searched

# Defaults are those of the dataclasses that cells are made of. Any: a field here may hold less than there.
_DATA: Any = DataSpec()
_OPTIM: Any = OptimSpec()
_MEASURE: Any = MeasureSpec()

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class DataFile(Strict):
    lerobot: Annotated[str, Field(min_length=1)] = ABSENT
    """Root folder of a LeRobot dataset; the shipped one when it is not given."""
    tokenizer: Annotated[str, Field(min_length=1)] = _DATA.tokenizer
    """A tokenizer.json of Hugging Face, or its folder; without one every byte of a text is a token."""
    workers: Annotated[int, Field(ge=0, le=64)] = _DATA.workers
    """Loader processes a rank."""


class OptimFile(Strict):
    lr: NonNegative = _OPTIM.lr
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = Field(default=list(_OPTIM.betas))
    eps: Positive = _OPTIM.eps
    weight_decay: NonNegative = _OPTIM.weight_decay
    head_lr: NonNegative = ABSENT
    """Learning rate of the action head; that of the rest when it is not given."""
    max_grad_norm: Positive = _OPTIM.max_grad_norm
    schedule: Literal["constant", "warmup_constant", "warmup_cosine"] = _OPTIM.schedule
    warmup_steps: Annotated[int, Field(ge=0)] = _OPTIM.warmup_steps
    total_steps: Annotated[int, Field(ge=1)] = _OPTIM.total_steps
    final_lr: NonNegative = _OPTIM.final_lr


class MeasureFile(Strict):
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = _MEASURE.warmup_steps
    """Steps before measuring starts."""
    steps: Count = _MEASURE.steps
    """Measured steps a launch."""
    launches: Annotated[int, Field(ge=1, le=1000)] = _MEASURE.launches
    """Fresh process groups a cell: the sample size of every statistic."""
    timeout_s: Positive = _MEASURE.timeout_s
    """Seconds that one launch may take, start to end."""
    hang_after_s: Positive = _MEASURE.hang_after_s
    """Seconds without progress of any rank after which a launch is called hung."""


def _word_or_number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise refuse("expect must be a word or a number")
    return value


class ThresholdFile(Strict):
    metric: MetricName
    where: Point = ABSENT
    """The cells this is demanded of; all of them when it is not given."""
    expect: Annotated[str | float, BeforeValidator(_word_or_number)] = ABSENT
    """The metric equals this."""
    min: float = ABSENT
    max: float = ABSENT
    vs: Literal["baseline"] = ABSENT
    max_regression: Fraction = ABSENT
    """How much worse than the baseline it may be: 5% or 0.05."""

    @model_validator(mode="after")
    def _makes_sense(self) -> ThresholdFile:
        metric, given = METRICS[self.metric], self.model_fields_set
        if not given & {"expect", "min", "max", "max_regression"}:
            raise refuse(f"demands nothing of {self.metric}", "give expect, min, max, or vs: baseline with max_regression")
        if ("vs" in given) != ("max_regression" in given):
            raise refuse("vs and max_regression go together", "vs: baseline, max_regression: 5%")
        if "max_regression" in given and metric.direction == "none":
            raise refuse(f"{self.metric} has no better direction to regress from", "give expect, min or max")
        if {"min", "max"} <= given and self.min > self.max:
            raise refuse(f"min {self.min} is above max {self.max}: nothing passes")
        if not metric.is_number and given & {"min", "max"}:
            raise refuse(f"{self.metric} is a word, not a number", "give expect")
        if "expect" in given:
            if metric.is_number and isinstance(self.expect, str):
                raise refuse(f"{self.metric} is a number, and {self.expect!r} is not")
            if metric.words:
                known(f"{self.metric} to expect", str(self.expect), metric.words)
        return self


class AxesBase(Strict):
    """Axes that are not a field of a cell are zipped: a list of points whose keys move together."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[list[Point], Field(min_length=1)]]


def _axis_of(value: Any) -> tuple[Any, Any]:
    return (Annotated[list[value], Field(min_length=1), BeforeValidator(searched)], ABSENT)


if TYPE_CHECKING:
    AxesFile = AxesBase
else:
    _VALUES = {name: of for name, of in get_type_hints(Point, include_extras=True).items() if name in Point.model_fields}
    AxesFile = create_model("AxesFile", __base__=AxesBase, **{name: _axis_of(value) for name, value in _VALUES.items()})


def _data_tag(value: Any) -> str:
    # The tag enters the path of an error; `spec.problems` takes out what stands in angle brackets.
    return "<mapping>" if isinstance(value, dict) else "<name>"


DataField = Annotated[
    Annotated[Literal["sample", "synthetic"], Tag("<name>")] | Annotated[DataFile, Tag("<mapping>")],
    Discriminator(_data_tag),
]


class NamedFile(Point):
    """What a matrix and a training file share: a name, and everything that a cell holds."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Of the run directory and of the baseline."""
    data: DataField = _DATA.kind
    """The shipped dataset, generated noise, or a mapping: a LeRobot dataset, a tokenizer."""
    optim: OptimFile = OptimFile()
    """AdamW and its schedule."""


class MatrixFile(NamedFile):
    """A matrix of cells to measure. Fields of a cell given here hold in every cell; `axes` vary."""

    axes: AxesFile = ABSENT
    """What varies: a list of values a field, or a named list of points whose keys move together."""
    include: list[Point] = Field(default=[])
    """Further points; what they leave out comes from the top level."""
    exclude: list[Point] = Field(default=[])
    """Points of the axes to leave out: those that agree with every key given."""
    measure: MeasureFile = MeasureFile()
    """How long to look."""
    reference: Point = ABSENT
    """The cells that others are compared with."""
    thresholds: list[ThresholdFile] = Field(default=[])
    """What `benchbox check` demands."""


class _Generator(GenerateJsonSchema):
    """Without a title a key, and without defaults that say nothing: null for "not given", a mapping of its own defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - signature of the base
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        if isinstance(schema.get("default"), Strict | None):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def json_schema() -> dict[str, Any]:
    """The JSON schema that editors complete and check a matrix with."""
    generated = MatrixFile.model_json_schema(schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated}
