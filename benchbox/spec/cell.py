"""A cell: one point of a matrix, fully resolved, named by the hash of what it holds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BYTES = "bytes"  # the tokenizer that needs no file

# Fields that came after records were published, and their defaults: there a cell keeps the id it always had.
_LATER = {"freeze": "full", "weights": None}
_LATER_OF_DATA = {"tokenizer": BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSpec:
    """AdamW and its schedule. Defaults are those of the pi family (openpi, lerobot)."""

    lr: float = 2.5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    head_lr: float | None = None  # None: the same as lr
    max_grad_norm: float = 1.0
    schedule: str = "warmup_cosine"  # constant | warmup_constant | warmup_cosine
    warmup_steps: int = 1000
    total_steps: int = 30_000
    final_lr: float = 2.5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Where samples come from: the shipped sample dataset, a LeRobot dataset, or generated noise; and what reads its text."""

    kind: str = "sample"  # sample | lerobot | synthetic
    path: str | None = None  # of the LeRobot dataset
    workers: int = 1  # loader processes a rank
    tokenizer: str = BYTES  # or the path of a tokenizer.json, or of its folder

    @property
    def tokenizer_file(self) -> Path | None:
        """The `tokenizer.json`; None for bytes."""
        if self.tokenizer == BYTES:
            return None
        path = Path(self.tokenizer)
        return path / "tokenizer.json" if path.is_dir() else path

    @property
    def reading(self) -> str:
        """What text is read as, in a line."""
        if self.kind == "synthetic":
            return "text: random tokens"
        if self.tokenizer == BYTES:
            return "text: every byte is a token; data: {tokenizer: PATH} names a tokenizer"
        return f"text: tokens of {self.tokenizer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of a matrix. `batch` is per rank and micro-step; a step consumes batch x accumulation x world_size samples."""

    policy: str
    size: str
    backend: str
    world_size: int
    batch: int
    cams: int = 1
    attention: str = "sdpa"
    checkpointing: bool = False
    recipe: str = "bf16_master"
    freeze: str = "full"
    weights: str | None = None  # published ones to start from: a safetensors file, or a folder of them
    accumulation: int = 1
    seed: int = 0
    data: DataSpec = field(default_factory=DataSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)

    @property
    def cell_id(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the resolved configuration."""
        hashed = _without(self.to_dict(), _LATER)
        hashed["data"] = _without(hashed["data"], _LATER_OF_DATA)
        text = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def samples_per_step(self) -> int:
        return self.batch * self.accumulation * self.world_size

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `Cell.from_dict` reads them back to an equal cell, and what an older benchbox wrote as well."""
        values = asdict(self)
        values["optim"]["betas"] = list(values["optim"]["betas"])
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        optim = dict(values["optim"])
        optim["betas"] = tuple(optim["betas"])
        return cls(**{**values, "data": DataSpec(**values["data"]), "optim": OptimSpec(**optim)})


def _without(values: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in defaults or value != defaults[name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSpec:
    """How long to look. The launch, not the step, is the statistical sample."""

    warmup_steps: int = 5
    steps: int = 10
    launches: int = 3
    timeout_s: float = 600.0  # of one launch, start to end
    hang_after_s: float = 120.0  # without any rank reporting progress, once the first one has begun to step
