"""The contracts between policies, data and the step. Typed with torch, but torch is not imported to read them.

A batch is a flat dictionary of tensors, born in `benchbox.data` as the policy's `BatchSpec` asks:

| key | shape and dtype | meaning |
|---|---|---|
| `images` | (B, T, C, 3, H, W) uint8 | current frame last in T; missing cameras and padded history are 0 and masked |
| `image_mask` | (B, T, C) bool | which of them are real |
| `state` | (B, T, S) float32 | raw units, zero-padded to `state_dim` |
| `action` | (B, N, A) float32 | raw units, zero-padded to `action_dim`; N = `horizon` |
| `action_is_pad` | (B, N) bool | steps past the end of the episode |
| `action_dim_mask` | (B, A) bool | which action dimensions the dataset has |
| `prompt_tokens`, `prompt_mask` | (B, P) int64, bool | task text, with the binned state in it where the spec asks |
| `response_tokens`, `response_mask` | (B, R) int64, bool | only when `response_tokens` > 0 |
| `fast_tokens`, `fast_mask` | (B, F) int64, bool | FAST tokens of the chunk, when `fast_tokens` > 0; pad id `fast_vocab` - 1 |
| `fast_truncated` | (B,) int64 | FAST tokens cut off to fit F |
| `noise` | (B, N, A) float32 | standard normal, drawn per sample from (seed, epoch, index) |
| `uniform` | (B, U) float32 | uniform in [0, 1), likewise: everything random in a step is in its batch |
| `dataset_index`, `episode_index`, `frame_index` | (B,) int64 | provenance |

Because the randomness of a step travels with its samples, a step is a function of parameters and batch: splitting a batch
over ranks or accumulation steps, recomputing under checkpointing, or validating in between changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    Batch = dict[str, Tensor]

NormalisationMode = Literal["identity", "mean_std", "min_max", "quantile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """What a policy needs of every sample. Sizes are after padding; see the module's table for shapes."""

    cameras: int
    image_size: tuple[int, int]  # (H, W) in pixels, letterboxed
    state_dim: int
    action_dim: int
    horizon: int
    history: int = 1
    prompt_tokens: int
    text_vocab: int
    state_in_prompt: bool = False
    state_bins: int = 256
    response_tokens: int = 0
    fast_tokens: int = 0
    fast_vocab: int = 2048
    uniforms: int = 1
    state_normalisation: NormalisationMode = "quantile"
    action_normalisation: NormalisationMode = "mean_std"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes of a matrix that change the policy itself."""

    cams: int = 1
    attention: Literal["eager", "sdpa"] = "sdpa"
    checkpointing: bool = False


@dataclass(frozen=True, slots=True)
class Role:
    """Which parameter group a parameter belongs to: decided by name and shape before anything is wrapped."""

    part: Literal["backbone", "head"]
    decay: bool


class Losses(NamedTuple):
    """What a policy returns. A named tuple, because every sharding wrapper knows how to find the tensors in one.

    `total` is the training loss, a float32 scalar: the mean over samples of each sample's masked mean. A mean of means is
    chosen on purpose: splitting a batch into equal parts, over ranks or accumulation steps, then leaves the gradient unchanged
    whatever the masks are. `parts` are the detached named terms, and whatever else a policy counts, as means over samples.
    `per_sample` holds, for each term, (sum, count), each (B,) float32, when it was asked for.
    """

    total: Tensor
    parts: dict[str, Tensor]
    per_sample: dict[str, tuple[Tensor, Tensor]] | None = None


class Policy(Protocol):
    """An `nn.Module` from `policies/<name>/policy.py`, built in float32 by that file's `build(preset, axes)`.

    Call it as `policy(batch)`, never `policy.forward`, so that sharding hooks fire.
    """

    def __call__(self, batch: Batch, *, per_sample: bool = False) -> Losses: ...

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        """Classes at which to shard and to checkpoint."""

    def batch_spec(self) -> BatchSpec: ...

    def parameter_roles(self) -> Mapping[str, Role]:
        """A role for every name in `named_parameters()`."""

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        """Fill the normalisation buffers: one mapping feature -> statistic -> values for every dataset."""
