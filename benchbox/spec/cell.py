"""A cell: one point of a matrix, fully resolved, identified by the hash of its configuration.

A field of a cell is declared here and nowhere else: matrix files, axes, `--only`, the editor schema, tables and labels follow.
Its annotation is the type that a matrix file is checked with, so annotations are evaluated.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Self

from benchbox.registry.contracts import AttentionKernel, CompileMode, Mode, PaddingMode
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.optim import ADDED_LATER as ADDED_LATER
from benchbox.spec.optim import OptimSpec as OptimSpec
from benchbox.spec.stored_fields import known_fields
from benchbox.spec.types import (
    BackendName,
    Batch,
    Count,
    FreezeName,
    OrderName,
    PolicyName,
    RecipeName,
    Seed,
    ShardSize,
    Size,
    WeightsPath,
)

BYTES = "bytes"  # the tokenizer that needs no file


def about(description: str) -> dict[str, str]:
    """Return the metadata of a field that a matrix file can set, with what an editor shows about it."""
    return {"description": description}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Source of the samples: the shipped dataset, a LeRobot dataset, or generated noise; and the tokenizer of its text."""

    kind: str = "sample"  # sample | lerobot | synthetic
    path: str | None = None  # of the LeRobot dataset
    workers: int = 1  # loader processes a rank
    tokenizer: str = field(default=BYTES, metadata=ADDED_LATER)  # or the path of a tokenizer.json, or of its folder
    block: int = field(default=16, metadata=ADDED_LATER)  # episode_shuffle: frames of an episode that are read together
    buffer: int = field(default=2048, metadata=ADDED_LATER)  # episode_shuffle: samples of all ranks that are mixed
    decoder: str = field(default="auto", metadata=ADDED_LATER)  # of videos: pyav | torchcodec, or the faster one of them
    datasets: tuple[DatasetSpec, ...] = field(default=(), metadata=ADDED_LATER)  # of a mixture, or one with settings
    mode: Mode = field(default="policy", metadata=ADDED_LATER)  # what is given, and what is predicted
    validation: float = field(default=0.0, metadata=ADDED_LATER)  # share of each dataset's episodes that is not trained on

    @property
    def lerobot_datasets(self) -> tuple[DatasetSpec, ...]:
        """The LeRobot datasets that are named, in order; none where the samples are of the shipped one or generated."""
        return self.datasets or (() if self.path is None else (DatasetSpec(path=self.path),))

    @property
    def label(self) -> str:
        """The dataset, or the datasets of a mixture."""
        return ", ".join(dataset.path for dataset in self.lerobot_datasets) or self.kind

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the data of a cell's `to_dict`; fields that are missing have their default."""
        datasets = tuple(DatasetSpec.from_dict(dataset) for dataset in values.get("datasets", ()))
        return cls(**{**known_fields(cls, values), "datasets": datasets})

    @property
    def tokenizer_file(self) -> Path | None:
        """The `tokenizer.json`; None for bytes."""
        if self.tokenizer == BYTES:
            return None
        path = Path(self.tokenizer)
        return path / "tokenizer.json" if path.is_dir() else path

    @property
    def reading(self) -> str:
        """One line on how text is tokenized."""
        if self.kind == "synthetic":
            return "text: random tokens"
        if self.tokenizer == BYTES:
            return "text: every byte is a token; data: {tokenizer: PATH} names a tokenizer"
        return f"text: tokens of {self.tokenizer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of a matrix. `batch` is per rank and micro-step; a step consumes batch x accumulation x world_size samples."""

    policy: PolicyName = field(metadata=about("The policy: a folder of `policies/`, the path of one, or as in hf:qwen3."))
    size: Size = field(metadata=about("A preset of the policy: tiny, small, full."))
    backend: BackendName = field(metadata=about("How parameters are sharded and gradients reduced."))
    world_size: Count = field(metadata=about("Ranks of a process group."))
    batch: Batch = field(metadata=about("Samples per rank and micro-step."))
    cams: Count = field(
        default=1,
        metadata=about("Cameras of every sample: the first of the dataset, in its order; those it lacks are black and masked."),
    )
    attention: AttentionKernel = field(
        default="sdpa", metadata=about("How attention is computed; flex needs a GPU, native is whatever the policy runs.")
    )
    checkpointing: bool = field(default=False, metadata=about("Whether activations are recomputed in the backward pass."))
    compile: CompileMode = field(
        default="off",
        metadata=about("What torch.compile compiles: off, blocks (each layer) or model (the whole policy).") | ADDED_LATER,
    )
    padding: PaddingMode = field(
        default="full",
        metadata=about(
            "Padding of a micro-batch: full, to the sizes of the policy, or longest, without cameras that no sample has and "
            "with texts as long as the longest."
        )
        | ADDED_LATER,
    )
    recipe: RecipeName = field(default="bf16_master", metadata=about("The precision recipe."))
    freeze: FreezeName = field(
        default="full", metadata=about("Which parts of the policy train: full is all of it.") | ADDED_LATER
    )
    weights: WeightsPath | None = field(
        default=None,
        metadata=about("Published weights to start from: a safetensors file or a folder of them.") | ADDED_LATER,
    )
    shard_size: ShardSize | None = field(
        default=None,
        metadata=about("Ranks that share one copy of the parameters under a hybrid backend, 2 by default.") | ADDED_LATER,
    )
    accumulation: Count = field(default=1, metadata=about("Micro-steps per optimizer step."))
    seed: Seed = field(default=0, metadata=about("Seed of the parameters and the data order."))
    order: OrderName = field(
        default="frame_shuffle", metadata=about("The order of samples: by frames, by episodes, or unshuffled.") | ADDED_LATER
    )
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)

    @property
    def cell_id(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the resolved configuration."""
        values = {"data": _nested_values(self.data), "optim": _nested_values(self.optim)}
        for name, added_later, default in _POINT_DEFAULTS:
            value = getattr(self, name)
            if not (added_later and value == default):
                values[name] = value
        return hashlib.sha256(_CANONICAL.encode(values).encode()).hexdigest()[:12]

    @property
    def samples_per_rank(self) -> int:
        """Samples that one rank consumes in an optimizer step."""
        return self.batch * self.accumulation

    @property
    def samples_per_step(self) -> int:
        """Samples that all ranks together consume in an optimizer step."""
        return self.samples_per_rank * self.world_size

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, which `from_dict` reads back to an equal cell."""
        values = asdict(self)
        values["optim"] = self.optim.to_dict()
        values["data"]["datasets"] = [dataset.to_dict() for dataset in self.data.datasets]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the cell of `to_dict`; a field that an older benchbox did not write has its default.

        Raises:
            RecordError: a newer benchbox wrote a field that this one does not know.
        """
        nested = {"data": DataSpec.from_dict(values["data"]), "optim": OptimSpec.from_dict(values["optim"])}
        return cls(**{**known_fields(cls, values), **nested})


# The fields that a matrix file sets by their name, as opposed to the nested `data` and `optim`.
POINT_FIELDS = tuple(declared for declared in fields(Cell) if "description" in declared.metadata)


_POINT_DEFAULTS = tuple(
    (declared.name, bool(declared.metadata.get("added_later")), declared.default) for declared in POINT_FIELDS
)
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_MAX_NESTED = 64
_nested: dict[int, tuple[Any, dict[str, Any]]] = {}  # by identity: equal specs, as of 1 and 1.0, may have different ids


def _nested_values(spec: DataSpec | OptimSpec) -> dict[str, Any]:
    """Return the identifying values of `data` or `optim`, which all cells of a matrix share and which are computed once."""
    entry = _nested.get(id(spec))
    if entry is None or entry[0] is not spec:
        if isinstance(spec, OptimSpec):
            values = spec.to_dict()
        else:
            values = asdict(spec) | {"datasets": [dataset.to_dict() for dataset in spec.datasets]}
        if len(_nested) >= _MAX_NESTED:
            _nested.clear()
        entry = _nested[id(spec)] = (spec, _identifying_values(spec, values))
    return entry[1]


def _identifying_values(spec: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a spec that enter the id: without fields that were added later and have their default."""
    identifying = {}
    for declared in fields(spec):
        value, nested = values[declared.name], getattr(spec, declared.name)
        if declared.metadata.get("added_later") and nested == declared.default:
            continue
        identifying[declared.name] = _identifying_values(nested, value) if is_dataclass(nested) else value
    return identifying


LIMITED_STEPS = 3  # under a memory limit, or of a search, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSpec:
    """Length of a measurement. The launch, not the step, is the statistical sample."""

    warmup_steps: int = 5
    steps: int = 10
    launches: int = 5  # fewer cannot settle any comparison
    timeout_s: float = 600.0  # of one launch, start to end
    hang_after_s: float = 120.0  # without progress of any rank, once all ranks have begun to step
    memory_limit: int | None = None  # bytes of one rank, beyond which it ends as oom

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the measurement of a plan; fields that this version does not have are ignored."""
        return cls(**{declared.name: values[declared.name] for declared in fields(cls) if declared.name in values})

    @property
    def probed_step(self) -> int:
        """Number of the step, from 0 on, whose memory and collectives are recorded: the second after those that are timed."""
        return self.warmup_steps + self.steps + 1
