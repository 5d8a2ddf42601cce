"""The contracts between policies, data and the step. Typed with torch, but torch is not imported to read them.

A batch is a flat dictionary of tensors, born in `benchbox.data` as the policy's `BatchSpec` asks. What the spec does not ask
for (a size of 0, False) is not in it; what it asks for and the data has not is masked.

| key | shape and dtype | meaning |
|---|---|---|
| `images` | (B, T, C, 3, H, W) uint8 | current frame last in T; missing cameras and padded history are 0 and masked |
| `image_mask` | (B, T, C) bool | which of them are not padding |
| `state` | (B, T, S) float32 | raw units, zero-padded to `state_dim` |
| `history_mask` | (B, T) bool | which of the T steps lie within the episode; the last always does |
| `action` | (B, N, A) float32 | raw units, zero-padded to `action_dim`; N = `horizon`, from frame `first_action` on |
| `action_is_pad` | (B, N) bool | steps before the start or past the end of the episode |
| `action_dim_mask` | (B, A) bool | which action dimensions the dataset has |
| `prompt_tokens`, `prompt_mask` | (B, P) int64, bool | task, with the binned state or the past memory where the spec asks |
| `response_tokens`, `response_mask` | (B, R) int64, bool | the subtask in words; masked where the data has none |
| `memory_tokens`, `memory_mask` | (B, M) int64, bool | what is to be remembered, in words; masked likewise |
| `metadata_tokens`, `metadata_mask` | (B, K, L) int64, bool | K fields about the episode; masked likewise |
| `subgoal_images`, `subgoal_mask` | (B, C, 3, H, W) uint8, (B, C) bool | where the subtask leads; masked likewise |
| `future_images`, `future_mask` | (B, F, C, 3, H, W) uint8, (B, F) bool | the frames after the current one |
| `fast_tokens`, `fast_mask` | (B, F) int64, bool | FAST tokens of the chunk; pad id `fast_vocab` - 1 |
| `fast_truncated` | (B,) int64 | FAST tokens cut off to fit F |
| `returns` | (B,) float32 | minus the steps left of the episode, over the longest: in [-1, 0] |
| `field_of_view` | (B, 2) float32 | horizontal, vertical, in radians; 0 where unknown |
| `noise` | (B, D, N, A) float32 | standard normal, drawn per sample from (seed, epoch, index); D = `noise_draws` |
| `latent_noise` | (B, *`latent_shape`) float32 | standard normal, likewise, when there is a shape |
| `<name>_cue_tokens` | (B, L) int64 | the fixed text `cues[<name>]`, all real |
| `uniform` | (B, U) float32 | uniform in [0, 1), likewise: everything random in a step is in its batch |
| `dataset_index`, `source_index`, `control_mode_index` | (B,) int64 | provenance: numbers of the names in `stream.provenance` |
| `episode_index`, `frame_index` | (B,) int64 | provenance: the episode of the dataset, and the frame of the episode |

Because the randomness of a step travels with its samples, a step is a function of parameters and batch: splitting a batch
over ranks or accumulation steps, recomputing under checkpointing, or validating in between changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from benchbox.registry.weights import LoadedWeights
    from benchbox.theory.flops import Product

    Batch = dict[str, Tensor]

AttentionKernel = Literal["eager", "sdpa", "flex", "native"]  # native: whatever the policy runs
CompileMode = Literal["off", "blocks", "model"]  # what torch.compile compiles: nothing, each layer, the whole policy
PaddingMode = Literal["full", "longest"]  # of a batch: to the sizes of the spec, or to those of its longest sample
Trimmable = Literal["cameras", "prompt", "response", "memory", "metadata", "fast"]
Mode = Literal["policy", "forward_dynamics", "inverse_dynamics", "joint"]  # what is given, and what is predicted
NormalisationMode = Literal["identity", "mean_std", "min_max", "quantile"]

# Keys of a batch that have a column for each camera, and the dimension of these columns; their masks, which say where it is
# real; and the masks of other keys. `latent_noise` has whatever columns `latent_shape` says, and is never cut.
CAMERA_DIMS = {"images": 2, "image_mask": 2, "subgoal_images": 1, "subgoal_mask": 1, "future_images": 2}
CAMERA_MASKS = {"images": "image_mask", "subgoal_images": "subgoal_mask"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Requirements of a policy on every sample. Sizes are after padding; see the table of the module for shapes."""

    cameras: int
    image_size: tuple[int, int]  # (H, W) in pixels, letterboxed
    state_dim: int
    action_dim: int
    horizon: int
    first_action: int = 0  # frame of the chunk's first action, counted from the current one: 0, or negative for earlier ones
    history: int = 1
    prompt_tokens: int = 0
    text_vocab: int = 259  # of the tokenizer of bytes
    state_in_prompt: bool = False
    state_bins: int = 256
    lowest_bin: int = -1  # of state values below the first bin: -1 in openpi and LeRobot, 0 in OpenTau
    prompt_end: str = ""  # a fixed text at the end of the prompt
    prompt_template: str = ""  # of {task}, {memory} and {state}, in place of openpi's texts; <eos> stands for that token
    response_tokens: int = 0
    response_template: str = "{text}<eos>"
    response_generated: bool = False  # the policy acts on a response of its own: it has `generate_response`
    memory_tokens: int = 0
    sole_targets: tuple[str, ...] = ()  # texts, of a policy that learns nothing else: data without all of them teach nothing
    metadata: tuple[int, int] = (0, 0)  # fields, tokens of each
    subgoal: bool = False
    future: int = 0  # frames
    returns: bool = False
    field_of_view: bool = False
    fast_tokens: int = 0
    fast_vocab: int = 2048
    uniforms: int = 1
    noise_draws: int = 1
    latent_shape: tuple[int, ...] = ()
    cues: Mapping[str, str] = field(default_factory=dict)  # name: a fixed text that stands between blocks of the prefix
    state_normalisation: NormalisationMode = "quantile"
    action_normalisation: NormalisationMode = "mean_std"
    # Parts whose padding may be left out where no sample of a micro-batch has them: columns of cameras, and the ends of texts.
    # A part is in it only if losses do not depend on its padding, neither through attention nor through positions or slots.
    trimmable: tuple[Trimmable, ...] = ()

    def __post_init__(self) -> None:
        if "cameras" in self.trimmable and self.latent_shape:
            message = "has cameras, and latent_shape does not say which columns of latent_noise are of cameras"
            raise ConfigurationError(Problem("BatchSpec.trimmable", message, "leave cameras out of it"))
        if not -self.horizon < self.first_action <= 0:
            message = f"is {self.first_action}, and a chunk of {self.horizon} actions must have that of the current frame"
            raise ConfigurationError(Problem("BatchSpec.first_action", message, f"write a number from {1 - self.horizon} to 0"))

    @property
    def acting_horizon(self) -> int:
        """Number of actions that a policy acts: those of a chunk from the current frame on."""
        return self.horizon + self.first_action

    @property
    def part_sizes(self) -> dict[Trimmable, int]:
        """Size of each part that may be trimmed and that this spec asks for: columns of cameras, and tokens of each text."""
        sizes: dict[Trimmable, int] = {
            "cameras": self.cameras,
            "prompt": self.prompt_tokens,
            "response": self.response_tokens,
            "memory": self.memory_tokens,
            "metadata": self.metadata[1] if self.metadata[0] else 0,
            "fast": self.fast_tokens,
        }
        return {part: size for part, size in sizes.items() if size}

    def fields(self, *, acting: bool = False) -> tuple[str, ...]:
        """Return the keys of a batch of this spec; with `acting`, those that are available before acting."""
        texts = {
            "prompt": self.prompt_tokens,
            "response": self.response_tokens,
            "memory": self.memory_tokens,
            "metadata": self.metadata[1],
        }
        inputs = [
            *("images", "image_mask", "state", "history_mask", "action_dim_mask", "noise", "dataset_index"),
            *(f"{text}_{part}" for text, length in texts.items() if length for part in ("tokens", "mask")),
            *(("subgoal_images", "subgoal_mask") if self.subgoal else ()),
            *(("field_of_view",) if self.field_of_view else ()),
            *(("latent_noise",) if self.latent_shape else ()),
            *(f"{name}_cue_tokens" for name in self.cues),
        ]
        targets = [
            *("action", "action_is_pad", "uniform"),
            *("source_index", "control_mode_index", "episode_index", "frame_index"),
            *(("future_images", "future_mask") if self.future else ()),
            *(("fast_tokens", "fast_mask", "fast_truncated") if self.fast_tokens else ()),
            *(("returns",) if self.returns else ()),
        ]
        return tuple(inputs) if acting else (*inputs, *targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The axes of a matrix that change the policy itself, and the mode of its data."""

    cams: int = 1
    attention: AttentionKernel = "sdpa"
    checkpointing: bool = False
    mode: Mode = "policy"  # another one only for a policy that declares it: `MODES` in its policy.py


@dataclass(frozen=True, slots=True)
class Role:
    """Parameter group of a parameter, decided by its name and shape before anything is wrapped.

    `tower` is the part of the network it is in, as FLOPs are counted and parts are frozen: vision, backbone, expert, ...
    """

    part: Literal["backbone", "head"]
    decay: bool
    tower: str = "backbone"


class Losses(NamedTuple):
    """Losses that a policy returns. A named tuple, because every sharding wrapper knows how to find the tensors in one.

    `total` is the training loss, a float32 scalar: the mean over samples of each sample's masked mean. A mean of means is
    chosen on purpose: splitting a batch into equal parts, over ranks or accumulation steps, then leaves the gradient unchanged
    whatever the masks are. `parts` are the detached named terms, and whatever else a policy counts: means over the samples that
    have them. `counts` are the numbers of these samples, () float32, by which the parts of several batches are averaged; a part
    without a number is a mean over all samples of the batch. A part with the number 0 has the value 0 and is not reported.
    Parts have the same names in every step and on every rank. `per_sample` holds, for each term, (sum, count), each (B,)
    float32, when it was asked for; None for a policy without losses per sample. With it, `sample_losses` (B,) float32 are the
    losses whose mean is `total`; None where these are the sums over the terms of sum / count.
    """

    total: Tensor
    parts: dict[str, Tensor]
    per_sample: dict[str, tuple[Tensor, Tensor]] | None = None
    counts: dict[str, Tensor] | None = None
    sample_losses: Tensor | None = None


class Policy(Protocol):
    """An `nn.Module` from `policies/<name>/policy.py`, built in float32 by that file's `build(preset, axes)`.

    It is built on the meta device, and its weights are computed while a backend shards it (`benchbox.backends.deferred`): until
    then no tensor of it has values to read. `load_weights` fills tensors in place, and so does `load_statistics`, which may
    replace those with a row per dataset.

    Call it as `policy(batch)`, never `policy.forward`, so that sharding hooks fire.

    A policy from `benchbox.adapt` has three methods more: `apply_axes`, called after `build`, `own_samples`, where it generates
    its batches, and `freeze_unused_parameters`. It has no `work` without a formula.

    A policy that uses other modules where parts of a batch are missing has `optional`, a mapping from the names of these parts
    to the fields that mask them, and `prepare_batch(batch)`, which its step calls: it returns the batch without what this
    training step drops, and the names of the parts that are then present on any rank, (Batch, frozenset of str).
    `benchbox estimate` reads from it which parts a step will have.

    A policy whose weights others publish may have `published_state_dict()`, which returns them under the published names, or
    raises UnsupportedError: `benchbox export` calls it.
    """

    def __call__(self, batch: Batch, *, per_sample: bool = False) -> Losses: ...

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        """Classes at which to shard, to checkpoint and to compile.

        Where a layer decides in `forward` whether it is recomputed, its method `block` is what is recomputed and compiled.
        """

    def batch_spec(self) -> BatchSpec: ...

    def parameter_roles(self) -> Mapping[str, Role]:
        """Return a role for every parameter, by its name before wrapping (`benchbox.observer.introspect.names`)."""

    def work(self, batch: Batch) -> list[Product]:
        """Return the matrix products of a forward pass over `batch`, by formula, in the order in which they run.

        Only the shapes are read, and which optional parts of the batch are present. The ranks agree on the latter: every rank
        calls at once, with its batch on the device of the process group. On the meta device everything counts as present.
        """

    def select_actions(self, batch: Batch) -> Tensor:
        """Denoise actions (B, N, A), in raw units, from the first `noise` of the batch; N = `acting_horizon`.

        The first action is that of the current frame, also where the chunks of the policy begin before it.

        Only the keys that are available before acting are read: no `action`, no FAST tokens, no future. Through a wrapper call
        `policy(batch, act=True)`, so that sharding hooks fire.

        Raises:
            UnsupportedError: this policy does not act.
        """

    def load_weights(self, path: Path) -> LoadedWeights:
        """Load published weights from a safetensors file or a folder of them, in float32, before anything is wrapped.

        An optional method: the cells of a policy without it name no weights.

        Raises:
            ConfigurationError: they are of another policy.
            DataError: a file is missing or damaged.
        """

    def load_statistics(self, statistics: list[Mapping[str, Mapping[str, list[float]]]]) -> None:
        """Fill the normalisation buffers: one mapping feature -> statistic -> values for every dataset of the mixture."""


class RespondingPolicy(Policy, Protocol):
    """A policy whose spec says `response_generated`: it acts on a response that it has written."""

    def generate_response(self, batch: Batch, end: Tensor) -> Batch:
        """Return the batch with a response (`response_tokens`, `response_mask`) of the policy's own, to act on.

        It is called outside wrappers, in evaluation, before `select_actions`.

        Args:
            batch: with the keys that are available before acting. What it has as response is ignored.
            end: (E,) int64, the tokens that follow the text of a response: its first one ends a response, and all are written
                then, as far as there is room.
        """
