"""What a checkpoint holds, whatever wrote it, and the facts that follow."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchbox.measure.witness.census import Sizes
from benchbox.measure.witness.facts import SECTIONS, LiveTensor, Numbers, RankFacts, SteppedTensor
from benchbox.measure.witness.kinds import dtype_name
from benchbox.measure.witness.looks import SIXTEEN_BIT
from benchbox.measure.witness.numerics import bf16_valued_share, stalled_share
from benchbox.measure.witness.updates import difference, sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_SEEN = frozenset({"stepped", "options", "links", "buffers"})
_PIECE_ELEMENTS = 2**22
_DEVICE = "file"
# By the end of their names: a state dict does not say which of its tensors are buffers.
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "freqs", "freqs_cis")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor that an optimizer stepped: the weight itself or a master, its state, its options.

    `weight` is None where the checkpoint holds only the state. `live` is the 16-bit tensor that a master was rounded into.
    `elements` is the size of the whole, of which the tensors may be a part.
    """

    name: str
    weight: Tensor | None
    live: Tensor | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    covers: tuple[str, ...] = ()
    elements: int | None = None

    def size(self, tensor: Tensor) -> Tensor:
        """As large as the whole of what `tensor` is a part of, of its dtype, with nothing in it."""
        whole = self.elements if self.elements is not None and tensor.ndim else tensor.numel()
        return torch.empty(whole, dtype=tensor.dtype, device="meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What one rank saved. Of the model's tensors only dtype and shape are looked at; they may be on the meta device."""

    rank: int
    world_size: int
    optimizer: str
    model: Mapping[str, Tensor]
    stepped: Sequence[StoredTensor]


def facts_of(stored: Stored) -> RankFacts:
    """The facts of a rank, as far as a checkpoint shows them."""
    sizes = Sizes()
    for name, tensor in stored.model.items():
        sizes.count("buffer" if is_buffer(name) else "parameter", tensor, tensor)
    for each in stored.stepped:
        if each.weight is not None and each.live is not None:
            sizes.count("master", each.weight, each.size(each.weight))
        for key, value in each.state.items():
            if isinstance(value, Tensor):
                sizes.count(str(key), value, each.size(value))
    missing = {name: "a checkpoint shows no steps" for name in SECTIONS if name not in _SEEN}
    if not stored.stepped:
        missing |= dict.fromkeys(("stepped", "options", "links"), "the checkpoint holds no optimizer state")
    if not stored.model:
        missing["buffers"] = "the checkpoint holds no model"
    if all(each.live is None for each in stored.stepped):
        missing.setdefault("links", "the checkpoint does not hold masters beside live weights")
    return RankFacts(
        rank=stored.rank,
        world_size=stored.world_size,
        source="checkpoint",
        optimizer_chain=(stored.optimizer,) if stored.stepped else (),
        entries=tuple(replace(entry, device=_DEVICE) for entry in sizes.entries(stored.rank)),
        stepped=tuple(_stepped(each, stored) for each in stored.stepped),
        parameters=tuple(_live(stored, buffers=False)),
        buffers=tuple(_live(stored, buffers=True)),
        missing=missing,
    )


def is_buffer(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _BUFFERS


def _live(stored: Stored, *, buffers: bool) -> Iterator[LiveTensor]:
    for name, tensor in stored.model.items():
        if is_buffer(name) == buffers:
            yield LiveTensor(
                name=name,
                dtype=dtype_name(tensor),
                device=_DEVICE,
                elements=tensor.numel(),
                ndim=tensor.ndim,
                trainable=not buffers and any(name == each.name or name in each.covers for each in stored.stepped),
            )


def _stepped(each: StoredTensor, stored: Stored) -> SteppedTensor:
    state = {str(name): value for name, value in each.state.items() if isinstance(value, Tensor)}
    weight = each.weight
    held = weight if weight is not None else next((v for v in state.values() if v.numel() > 1), None)
    live = each.live if each.live is not None else weight
    step = each.state.get("step", each.options.get("step"))
    betas = each.options.get("betas")
    return SteppedTensor(
        name=each.name,
        optimizer=stored.optimizer,
        # Of state without its weight nothing is said of what was stepped: the state's own dtypes are below.
        dtype="unknown" if weight is None else dtype_name(weight),
        device=_DEVICE,
        shape=() if held is None else tuple(held.shape),
        elements=each.elements if each.elements is not None else (0 if held is None else held.numel()),
        live=each.live is None and weight is not None,
        live_dtype=None if live is None else dtype_name(live),
        covers=each.covers,
        lr=_number(each.options.get("lr")),
        betas=None if betas is None else (float(betas[0]), float(betas[1])),
        eps=_number(each.options.get("eps")),
        weight_decay=_number(each.options.get("weight_decay")),
        state={name: dtype_name(value) for name, value in state.items()},
        compensation=_compensation(state),
        step_count=_number(step),
        numbers=_numbers(each, state, step),
    )


def _number(value: Any) -> float | None:
    return None if value is None or (isinstance(value, Tensor) and value.numel() != 1) else float(value)


def _compensation(state: Mapping[str, Tensor]) -> str | None:
    return next((f"Kahan buffer {name}" for name in state if "kahan" in name or name == "compensation"), None)


def _numbers(each: StoredTensor, state: Mapping[str, Tensor], step: Any) -> Numbers:
    valued = {}
    for name, tensor in {"weight": each.weight, **state}.items():
        if tensor is not None and name != "step" and dtype_name(tensor) == "float32":
            share = _nonzero_valued_share(tensor)
            if share is not None:
                valued[name] = share
    second, betas = state.get("exp_avg_sq"), each.options.get("betas")
    stalls = second is not None and dtype_name(second) in SIXTEEN_BIT and betas is not None
    return Numbers(
        second_moment_stalled=stalled_share(second, float(betas[1])) if stalls and second is not None and betas else None,
        steps_before=None if step is None else int(float(step)),
        bf16_valued=valued,
        live_differs=_differs(each),
    )


def _nonzero_valued_share(tensor: Tensor) -> float | None:
    """A piece at a time: the tensor may be larger than memory, and lie in a mapped file."""
    exact = of = 0.0
    for piece in tensor.detach().reshape(-1).split(_PIECE_ELEMENTS):
        held = piece[piece != 0]
        share = bf16_valued_share(held)
        if share is not None:
            exact += share * held.numel()
            of += held.numel()
    return exact / of if of else None


def _differs(each: StoredTensor) -> float | None:
    """Live weights against the masters cast to their dtype."""
    if each.live is None or each.weight is None or each.live.numel() != each.weight.numel():
        return None
    live, master = sample(each.live, _PIECE_ELEMENTS), sample(each.weight, _PIECE_ELEMENTS)
    return difference(master.to(live.dtype), live)
