"""Pydantic models of the matrix file, from which `matrices/schema.json` is generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from benchbox.registry.contracts import Mode  # noqa: TC001 (pydantic evaluates the annotation)
from benchbox.spec.cell import LIMITED_STEPS, DataSpec, MeasureSpec
from benchbox.spec.fields import POINT_TYPES, Point
from benchbox.spec.optim_file import OptimFile
from benchbox.spec.threshold_section import ThresholdFile  # noqa: TC001 (pydantic evaluates the annotation)
from benchbox.spec.types import ABSENT, ByteCount, Count, Strict, refusal, reject_search

# Defaults are those of the dataclasses. Any: the type of a key in the file may be narrower than that of the field.
_DATA: Any = DataSpec()
_MEASURE: Any = MeasureSpec()

_MIN_LIMIT = 2**20  # less was meant in another unit

Positive = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


class DatasetFile(Strict):
    lerobot: Text = ABSENT
    """Root folder of a LeRobot dataset."""
    rename: dict[Text, Text] = ABSENT
    """Cameras of the dataset by their names, and the names that policies are given them under."""
    control_mode: Text = ABSENT
    """What actions mean, as in joint, ee: a name that travels with every sample."""
    source: Text = ABSENT
    """Where the frames come from: a name that travels with every sample, by default that of the folder."""
    keep: Text = ABSENT
    """File with the ranges of frames that are drawn, as JSON or Parquet; all frames when it is absent."""


class MixtureFile(DatasetFile):
    lerobot: Text
    """Root folder of a LeRobot dataset."""
    weight: Positive = ABSENT
    """Share of drawn samples, relative to the other datasets. Without weights every frame is drawn once per epoch."""


class DataFile(DatasetFile):
    lerobot: Text = ABSENT
    """Root folder of a LeRobot dataset; the shipped one when it is absent."""
    mixture: Annotated[list[MixtureFile], Field(min_length=1)] = ABSENT
    """Several datasets, in place of one."""
    mode: Mode = _DATA.mode
    """What is given and what is predicted; only policy, unless the policy has modes."""
    validation: Annotated[float, Field(ge=0, lt=1)] = _DATA.validation
    """Share of the episodes of each dataset that is not trained on, chosen by the seed."""
    tokenizer: Text = _DATA.tokenizer
    """A tokenizer.json of Hugging Face, or its folder; without one every byte of a text is a token."""
    decoder: Literal["auto", "pyav", "torchcodec"] = _DATA.decoder
    """Decoder of videos; auto measures those that are installed, once per dataset and machine, and takes the faster one."""
    workers: Annotated[int, Field(ge=0, le=64)] = _DATA.workers
    """Loader processes per rank."""
    block: Annotated[int, Field(ge=1, le=65536)] = _DATA.block
    """Consecutive frames of an episode that `order: episode_shuffle` reads together."""
    buffer: Annotated[int, Field(ge=1, le=10_000_000)] = _DATA.buffer
    """Samples of all ranks among which `order: episode_shuffle` mixes."""


def _check_limit(limit: int) -> int:
    if limit < _MIN_LIMIT:
        raise refusal(f"memory_limit is {limit} bytes, in which no rank trains", "give it with a unit, as in 40 GiB or 512 MiB")
    return limit


class MeasureFile(Strict):
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = _MEASURE.warmup_steps
    """Steps before measuring starts."""
    steps: Count = _MEASURE.steps
    """Measured steps per launch."""
    launches: Annotated[int, Field(ge=1, le=1000)] = _MEASURE.launches
    """Fresh process groups per cell: the sample size of every statistic."""
    timeout_s: Positive = _MEASURE.timeout_s
    """Seconds that one launch may take, start to end."""
    hang_after_s: Positive = _MEASURE.hang_after_s
    """Seconds without progress of any rank after which a launch counts as hung."""
    memory_limit: Annotated[
        ByteCount, AfterValidator(_check_limit), WithJsonSchema({"type": ["integer", "string"], "minimum": _MIN_LIMIT})
    ] = _MEASURE.memory_limit
    """Memory that one rank may use, as in 40 GiB: beyond it a launch ends as oom. It is the device's own when it is absent."""

    @model_validator(mode="after")
    def _check_limited_steps(self) -> MeasureFile:
        if self.memory_limit is not None and self.warmup_steps < LIMITED_STEPS:
            raise refusal(
                f"memory_limit holds during the warm-up, and warmup_steps is {self.warmup_steps}",
                f"give at least {LIMITED_STEPS}: the second step is the first with the state of the optimizer",
            )
        return self


class SearchFile(Strict):
    """A search for the largest batch that fits, in every combination of the other axes."""

    search: Literal["max"]
    """A walk: larger and larger batches until a launch runs out of memory, then the bracket is halved."""
    start: Count = 1
    """The batch to begin with, at which all combinations are compared."""
    at_most: Count = ABSENT
    """The largest batch to try; no limit when it is absent."""

    @model_validator(mode="after")
    def _check_order(self) -> SearchFile:
        if self.at_most is not None and self.at_most < self.start:
            raise refusal(f"at_most {self.at_most} is below start {self.start}: there is no batch to try")
        return self


class AxesBase(Strict):
    """Axes that are not a field of a cell are zipped: a list of points whose keys move together."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[list[Point], Field(min_length=1)]]


def _tag(value: Any) -> str:
    # The tag enters the location of an error; `spec.problems` removes parts in angle brackets.
    return "<mapping>" if isinstance(value, dict) else "<other>"


def _axis_of(name: str, value: Any) -> tuple[Any, Any]:
    values = Annotated[list[value], Field(min_length=1)]
    if name == "batch":
        searched = Annotated[SearchFile, Tag("<mapping>")]
        return (Annotated[Annotated[values, Tag("<other>")] | searched, Discriminator(_tag)], ABSENT)
    return (Annotated[values, BeforeValidator(reject_search)], ABSENT)


if TYPE_CHECKING:
    AxesFile = AxesBase
else:
    AxesFile = create_model(
        "AxesFile", __base__=AxesBase, **{name: _axis_of(name, value) for name, value in POINT_TYPES.items()}
    )


DataField = Annotated[
    Annotated[Literal["sample", "synthetic"], Tag("<other>")] | Annotated[DataFile, Tag("<mapping>")],
    Discriminator(_tag),
]


class NamedFile(Point):
    """Common keys of a matrix and a training file: a name, and all fields of a cell."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run directory and of the baseline."""
    data: DataField = _DATA.kind
    """The shipped dataset, generated noise, or a mapping: LeRobot datasets, a tokenizer."""
    optim: OptimFile = OptimFile()
    """AdamW and its schedule."""


class MatrixFile(NamedFile):
    """A matrix of cells to measure. Fields of a cell given here hold in every cell; `axes` vary."""

    axes: AxesFile = ABSENT
    """Axes: a list of values per field, or a named list of points whose keys move together."""
    include: list[Point] = Field(default=[])
    """Further points; what they leave out comes from the top level."""
    exclude: list[Point] = Field(default=[])
    """Points of the axes to leave out: those that agree with every key given."""
    measure: MeasureFile = MeasureFile()
    """Length of a measurement."""
    reference: Point = ABSENT
    """The cells that others are compared with."""
    thresholds: list[ThresholdFile] = Field(default=[])
    """Demands that `benchbox check` makes."""


OF_MATRICES = frozenset(MatrixFile.model_fields) - frozenset(NamedFile.model_fields)
"""Keys of matrices alone."""


class _Generator(GenerateJsonSchema):
    """Generator that omits titles, and defaults that tell nothing: null for an absent key, a mapping of only defaults."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002 - signature of the base
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        if isinstance(schema.get("default"), Strict | None):
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def json_schema(model: type[Strict] = MatrixFile) -> dict[str, Any]:
    """Return the JSON schema with which editors complete and check a file of that model."""
    generated = model.model_json_schema(schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated}
