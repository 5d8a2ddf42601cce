"""BXP1xx: what the optimizer steps, and how it is stored."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from benchbox.audit.facts import Census, SteppedTensor, all_stepped
from benchbox.audit.rules.rule import Breach, Rule, stepped_evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIXTEEN_BIT = ("bfloat16", "float16")
_ADAPTER_MARKS = ("lora_", "adapter")


def _is_adapter(tensor: SteppedTensor) -> bool:
    return any(mark in tensor.name for mark in _ADAPTER_MARKS)


def _sixteen_bit_steps(censuses: Sequence[Census]) -> Iterator[Breach]:
    found = [
        (rank, tensor) for rank, tensor in all_stepped(censuses) if tensor.dtype in SIXTEEN_BIT and tensor.compensation is None
    ]
    found.sort(key=lambda item: (item[1].optimizer, _is_adapter(item[1])))  # stable: ranks and names stay in order
    for (optimizer, adapter), group in groupby(found, key=lambda item: (item[1].optimizer, _is_adapter(item[1]))):
        tensors = list(group)
        yield Breach("warning" if adapter else "error", optimizer, tensors[0][0], stepped_evidence(tensors))


RULES = (
    Rule(
        code="BXP101",
        title="the optimizer steps 16-bit tensors, and nothing keeps what rounding loses",
        severity="error",
        why="bfloat16 keeps 8 significant bits: an update below 2^-9 of its weight is rounded away, however often it comes",
        measured="dtype of every tensor the innermost optimizer updates, read on all ranks inside its step",
        repair=(
            "let the optimizer step float32 masters (recipe bf16_master) or float32 parameters under autocast (fp32_autocast); "
            "then tune the learning rate again, because updates that were lost now arrive"
        ),
        references=("OpenTau#181", "accelerate#3979", "transformers#42805", "AReaL#1292"),
        check=_sixteen_bit_steps,
    ),
)
