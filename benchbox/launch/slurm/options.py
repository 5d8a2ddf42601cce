"""`--slurm nodes=2,time=01:00:00`: the resources of a job, each checked, since they become lines of a script."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean
from benchbox.spec.overrides import split_at_commas

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NUMBER = (r"[1-9][0-9]*", "a number from 1")
_NAME = (r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", "a name of letters, digits and _ . + -")

# By option of sbatch without its dashes: the values it may have, as a regular expression and in words.
_OPTIONS = {
    "nodes": _NUMBER,
    "gpus_per_node": (r"([A-Za-z0-9_][A-Za-z0-9_.+-]*:)?[1-9][0-9]*", "a number from 1, after a type or not, such as h100:8"),
    "cpus_per_task": _NUMBER,
    "partition": _NAME,
    "account": _NAME,
    "qos": _NAME,
    "reservation": _NAME,
    "constraint": (r"[A-Za-z0-9_][A-Za-z0-9_.&|*-]*", "features joined by & or |"),
    "nodelist": (r"[A-Za-z0-9_][A-Za-z0-9_.,\[\]-]*", "names of nodes, such as [a[1-4],b]"),
    "mem": (r"[0-9]+[KMGT]?", "a size, such as 64G"),
    "exclusive": (r"|user|mcs|topo", "nothing, user, mcs or topo"),
    "signal": (r"([BR]:)?[A-Z][A-Z0-9]*(@[0-9]+)?", "a signal and seconds before the end, such as USR1@120"),
    "time": (r"[0-9]+(-[0-9]+)?(:[0-9]+){0,2}", "a time, such as 30 (minutes), 01:30:00 or 2-12:00"),
}


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Resources of a job, by the names of sbatch's options."""

    values: Mapping[str, str]

    @property
    def nodes(self) -> int:
        return int(self.values.get("nodes", "1"))

    @property
    def gpus_per_node(self) -> int | None:
        """GPUs of a node, None where none are asked for."""
        gpus = self.values.get("gpus_per_node")
        return None if gpus is None else int(gpus.rpartition(":")[2])


def parse_slurm_options(texts: Iterable[str]) -> SlurmOptions:
    """Return the checked values of `--slurm` options; of several values for a key, the last.

    Raises:
        ConfigurationError: with every key that does not exist and every value that is not of its form.
    """
    values: dict[str, str] = {}
    problems = []
    for part in (part for text in texts for part in split_at_commas(text)):
        key, equals, value = (word.strip() for word in part.partition("="))
        if value.startswith("[") and value.endswith("]"):  # brackets protect the commas of a list of nodes
            value = value[1:-1]
        where = f"--slurm {part}"
        if not equals and key != "exclusive":
            problems.append(Problem(where, "is not key=value", "write it as --slurm nodes=2"))
        elif key not in _OPTIONS:
            problems.append(Problem(where, f"there is no option {key!r}", did_you_mean(key, _OPTIONS)))
        elif not re.fullmatch(_OPTIONS[key][0], value):
            problems.append(Problem(where, f"{value!r} is not {_OPTIONS[key][1]}"))
        else:
            values[key] = value
    if problems:
        raise ConfigurationError(problems)
    return SlurmOptions(values)
