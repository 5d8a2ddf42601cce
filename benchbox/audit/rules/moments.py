"""BXP2xx: the optimizer's moments."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from benchbox.audit.facts import Census, SteppedTensor, all_stepped
from benchbox.audit.rules.rule import Breach, Rule, stepped_evidence

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchbox.audit.findings import Severity

# Decay multiplies v by beta2. Half a unit in bfloat16's last place is between 2^-9 and 2^-8 of the value: a decay smaller than
# the first is rounded back for every mantissa, one smaller than the second for some.
ALWAYS_STALLS = 2.0**-9
MAY_STALL = 2.0**-8


def _severity(tensor: SteppedTensor) -> Severity | None:
    if tensor.state.get("exp_avg_sq") != "bfloat16" or tensor.betas is None:
        return None
    decay = 1.0 - tensor.betas[1]
    if decay <= ALWAYS_STALLS:
        return "error"
    return "warning" if decay < MAY_STALL else None


def _second_moment_stalls(censuses: Sequence[Census]) -> Iterator[Breach]:
    judged = [(_severity(tensor), rank, tensor) for rank, tensor in all_stepped(censuses)]
    found = [(severity, rank, tensor) for severity, rank, tensor in judged if severity is not None]

    def key(item: tuple[Severity, int, SteppedTensor]) -> tuple[str, str, tuple[float, float] | None]:
        return item[0], item[2].optimizer, item[2].betas

    for (_, optimizer, betas), group in groupby(sorted(found, key=key), key=key):
        items = list(group)
        evidence = {"state": "exp_avg_sq in bfloat16", "beta2": betas and betas[1]}
        yield Breach(items[0][0], optimizer, items[0][1], evidence | stepped_evidence([item[1:] for item in items]))


RULES = (
    Rule(
        code="BXP201",
        title="the second moment is bfloat16 and cannot decay",
        severity="error",
        why=(
            "v * beta2 rounds back to v: v only ever rises, so after gradients fall the steps stay too small; "
            "at beta2 0.999 every mantissa is caught, at 0.998 most, at 0.996 none"
        ),
        measured="dtype of exp_avg_sq after the step, and beta2 of the parameter group it belongs to, on all ranks",
        repair="keep optimizer state in float32 (recipe bf16_master), or lower beta2 to 0.995 or less",
        references=("OpenTau#181", "AReaL#1292"),
        check=_second_moment_stalls,
    ),
)
