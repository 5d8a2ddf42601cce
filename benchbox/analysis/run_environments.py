"""Environments of launches and runs: what must be the same on both sides before their figures are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import matrix_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchbox.registry.launch_record import LaunchRecord

# If launches differ in any of these, a ratio would measure that difference too.
_SAME_ENVIRONMENT = (
    "machine",
    "launcher",
    "benchbox",
    "benchbox_sha256",
    "policy_sha256",
    "torch",
    "accelerate",
    "deepspeed",
    "driver",
    "cuda",
    "threads",
    "variables",
)

# The same, but older records lack them, and what is unknown on one side is no difference.
ADDED_KEYS = ("nccl", "numerics", "cpu_capability", "data_sha256")

# Key -> the field of a cell from which its value follows: it may differ where the field does.
FIELD_OF_KEY = {"policy_sha256": "policy", "data_sha256": "data"}

ENVIRONMENT_KEYS = (*_SAME_ENVIRONMENT, *ADDED_KEYS)

# Of all launches of a run, whatever their cells.
_SAME_IN_A_RUN = ("machine", "benchbox", "torch", "accelerate", "deepspeed", "driver", "cuda", "nccl", "cpu_capability")

# Of all launches of a run with as many ranks. The others depend on the cell, and each of its launches has the same.
_SAME_OF_RANKS = ("launcher", "threads", "variables")

_THREAD_VARIABLES = ("OMP_NUM_THREADS",)

# A gate judges what their change does; and the machine has a message of its own.
_JUDGED_BY_GATE = ("machine", "benchbox_sha256", "policy_sha256")


def environment_differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], *, include_machine: bool = False
) -> dict[str, str]:
    """Return what two runs were not both measured with: a text for every key of the environment that differs.

    Sources of the policy and of benchbox may differ: their change is what is judged. The version of benchbox may not, since it
    may measure in another way. What one side does not know is no difference.
    """
    differences = {}
    for key in ENVIRONMENT_KEYS:
        first, second = (environment_value(side, key) for side in (ours, theirs))
        is_judged = key in _JUDGED_BY_GATE and not (include_machine and key == "machine")
        if not is_judged and None not in (first, second) and first != second:
            differences[key] = f"{key} {value_text(key, first)} against {value_text(key, second)}"
    return differences


def run_differences(
    ours: Mapping[int, Mapping[str, Any]], theirs: Mapping[int, Mapping[str, Any]], *, include_machine: bool = False
) -> dict[str, str]:
    """Return `environment_differences` of two runs whose environments are given by number of ranks.

    A rank has its share of the cores as threads. So only cells of as many ranks are compared, and where there are none, what
    follows from their number is left out.
    """
    pairs = [(ours[ranks], theirs[ranks]) for ranks in ours.keys() & theirs.keys()]
    if not pairs:
        pairs = [(without_threads(any_environment(ours)), without_threads(any_environment(theirs)))]
    differences: dict[str, str] = {}
    for first, second in pairs:
        differences |= environment_differences(first, second, include_machine=include_machine)
    return differences


def without_threads(environment: Mapping[str, Any]) -> dict[str, Any]:
    variables = environment.get("variables")
    if variables is not None:
        variables = {name: value for name, value in variables.items() if name not in _THREAD_VARIABLES}
    return {**environment, "threads": None, "variables": variables}


def mixed_environment(records: Iterable[LaunchRecord], run: str = "the run") -> dict[str, str]:
    """Return what launches of one run that ended ok were not all measured with: a text for every key of the environment."""
    values: dict[tuple[str, Any], dict[str, None]] = {}  # key, what its values may depend on -> values
    for record in records:
        for key in ENVIRONMENT_KEYS if record["status"] == "ok" else ():
            depends_on = None if key in _SAME_IN_A_RUN else record["cell_id"]
            if key in _SAME_OF_RANKS:
                depends_on = record["cell"]["world_size"]
            if (value := environment_value(record["environment"], key)) is not None:
                values.setdefault((key, depends_on), {})[value_text(key, value)] = None
    return {
        key: f"launches of {run} differ in {key}: {', '.join(texts)}" for (key, _), texts in values.items() if len(texts) > 1
    }


def same_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a launch's environment in which launches must agree before a ratio of them means anything."""
    return {key: value for key in ENVIRONMENT_KEYS if (value := environment.get(key)) is not None}


def latest_environment(records: Sequence[LaunchRecord]) -> Mapping[str, Any]:
    """Return the environment of the latest launch that recorded its machine: one that failed early has a part of it only."""
    environments = [record["environment"] for record in reversed(records) if record["environment"]]
    return next((environment for environment in environments if environment.get("machine")), next(iter(environments), {}))


def environments_by_ranks(records: Sequence[LaunchRecord]) -> dict[int, Mapping[str, Any]]:
    """Return `latest_environment` of the launches of each number of ranks, that of the latest launch first.

    Those of a run whose cells have several data do not say which.
    """
    by_ranks: dict[int, list[LaunchRecord]] = {}
    for record in reversed(records):
        by_ranks.setdefault(record["cell"]["world_size"], []).append(record)
    environments = {ranks: latest_environment(launches[::-1]) for ranks, launches in by_ranks.items()}
    if len({(record["environment"] or {}).get("data_sha256") for record in records if record["status"] == "ok"}) > 1:
        return {ranks: {**environment, "data_sha256": None} for ranks, environment in environments.items()}
    return environments


def any_environment(by_ranks: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return one of a run's environments, one that knows its machine: what does not depend on the ranks is the same in all."""
    environments = list(by_ranks.values())
    return next((environment for environment in environments if environment.get("machine")), next(iter(environments), {}))


def steps_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return how the steps of two runs' launches differ, by their `measure`: losses and lost updates depend on both numbers."""
    for key, name in (("steps", "measured steps"), ("warmup_steps", "warm-up steps")):
        sides = ours.get(key), theirs.get(key)
        if None not in sides and sides[0] != sides[1]:
            return f"{sides[0]} {name} against {sides[1]}"
    return None


def memory_limit_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Return how the memory limits of two runs differ, by their `measure`: the largest and the fastest batch depend on them."""
    limits = [measure.get("memory_limit") for measure in (ours, theirs)]
    if limits[0] == limits[1]:
        return None
    texts = ["no memory_limit" if limit is None else f"memory_limit {quantity(limit, 'bytes')}" for limit in limits]
    return " against ".join(texts)


def environment_value(environment: Mapping[str, Any] | None, key: str) -> Any:
    value = (environment or {}).get(key)
    # A variable that is null is not set, as one that an older record does not list.
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def value_text(name: str, value: Any) -> str:
    """Return a value as text; of a SHA-256 the digits that tell two apart."""
    return value[:12] if name.endswith("_sha256") and isinstance(value, str) else matrix_text(value)
