"""`load`, `run` and `compare`: the commands of the same names, from Python."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from benchbox.analysis.inference import RELEVANT
from benchbox.analysis.sides import compare_sides, open_side
from benchbox.api.results import Results
from benchbox.errors import EXIT_CELL_FAILED, EXIT_OK, EXIT_USAGE, BenchboxError, ConfigurationError, Problem
from benchbox.spec import load_matrix, parse_overrides

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Any

    from benchbox.analysis.changes import RunComparison


_ERROR_PREFIXES = ("error: ", "Error: ")  # of a command, and of the parser of its options


def load(path: str | Path) -> Results:
    """Return a run directory as data frames.

    Raises:
        RecordError: it is none.
    """
    return Results(Path(path))


def run(
    matrix: str | Path,
    *,
    out: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    only: str | Sequence[str] = (),
    launches: int | Literal["auto"] | None = None,
    policy_dirs: str | Path | Sequence[str | Path] = (),
    options: str | Sequence[str] = (),
) -> Results:
    """Measure a matrix in a process of its own, print its progress, and return the results.

    The command does the work, so that records are those of `benchbox run`: a repeated call reuses launches that ended ok. Cells
    that fail do not raise: `results.cells.status` tells.

    Args:
        matrix: a matrix file, or the name of one in `matrices/`.
        out: the run directory; by default `runs/<name of the matrix>`.
        overrides: values of the matrix by key, such as {"size": "small", "axes.batch": [1, 2]}. Text is text, and no YAML.
        launches: of every cell, or "auto", as of `--launches`; by default those of the matrix.
        only: expressions that select cells, as of `--only`, or one.
        policy_dirs: folders of further policies, as of `--policy-dir`, or one.
        options: more options of `benchbox run`, but not `--out`: their words, or one text of them as in a shell.

    Raises:
        ConfigurationError: the matrix or an argument is wrong.
        BenchboxError: the command was stopped, or failed in another way.
    """
    if isinstance(launches, int) and launches < 1:
        raise ConfigurationError(f"launches={launches}: give 1 or more")
    sets = [f"{key}={_yaml(f'overrides {key}', value)}" for key, value in (overrides or {}).items()]
    further = [Path(folder) for folder in _several(policy_dirs)]
    folder = Path(out) if out is not None else Path("runs") / load_matrix(Path(matrix), parse_overrides(sets), further).name
    arguments = ["run", str(matrix), "--out", str(folder), *_words(options)]
    arguments += [word for text in sets for word in ("--set", text)]
    arguments += [word for text in _several(only) for word in ("--only", text)]
    arguments += [word for policies in further for word in ("--policy-dir", str(policies))]
    arguments += [] if launches is None else ["--launches", str(launches)]
    command = [sys.executable, "-m", "benchbox.cli.app", *arguments]
    # Both streams are read here: what a child writes to the terminal itself does not reach a notebook.
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        errors = []
        for line in process.stdout:
            if line.startswith(_ERROR_PREFIXES):
                errors.append(line.rstrip())
            else:
                print(line, end="")
    code = process.returncode
    if code not in (EXIT_OK, EXIT_CELL_FAILED):  # the errors are raised, and not printed as well
        kind = ConfigurationError if code == EXIT_USAGE else BenchboxError
        raise kind("\n".join(line.partition(": ")[2] for line in errors) or f"benchbox run ended with exit code {code}")
    for line in errors:
        print(line)
    return Results(folder)


def compare(
    base: str | Path,
    head: str | Path,
    *,
    metrics: str | Sequence[str] = (),
    vary: str | Collection[str] = (),
    relevant: float = RELEVANT,
) -> RunComparison:
    """Return what became better or worse from one run to another, for every metric of every cell.

    Args:
        base: a run directory, a baseline, JSON of pytest-benchmark, or `REV:PATH` of one of them in git.
        head: the same.
        metrics: numeric metrics, or names of ratios of benchmarks; by default those of `benchbox compare`.
        vary: keys of the environment that may differ, such as torch.
        relevant: a smaller relative change is none; above 0 and below 1.

    Raises:
        RecordError: a side cannot be read.
        ConfigurationError: there is no such metric or key of the environment, or `relevant` is no share.
    """
    try:
        is_share = 0 < relevant < 1
    except TypeError:  # as of "2%"
        is_share = False
    if not is_share:
        raise ConfigurationError(f"relevant={relevant!r}: write 2% as 0.02")
    sides = open_side(str(base)), open_side(str(head))
    keys = [key.strip() for text in _several(vary) for key in text.split(",")]
    return compare_sides(*sides, metric_names=_several(metrics), vary=keys, relevant=relevant)


def _several(values: str | Path | Collection[Any]) -> list[Any]:
    """Return values as a list: one text is one value, not its characters."""
    return [values] if isinstance(values, str | Path) else list(values)


def _words(options: str | Sequence[str]) -> list[str]:
    """Return the words of options.

    Raises:
        ConfigurationError: a quotation does not end, or they name another run directory than the one that is read.
    """
    try:
        words = shlex.split(options) if isinstance(options, str) else list(options)
    except ValueError as error:
        raise ConfigurationError(Problem(f"options {options}", str(error))) from None
    if any(str(word).partition("=")[0] == "--out" for word in words):
        raise ConfigurationError(Problem("options --out", "is not read from there", "write out=..."))
    return words


def _yaml(where: str, value: Any) -> str:
    """Return a value as `--set` reads it. Text stays text, whatever it would be in YAML: 007, null, or with a comment."""
    text = json_of(where, value)
    return re.sub(r"\\(.)", lambda escape: r"\x22" if escape[1] == '"' else escape[0], text)  # --set ends text at each quote


def json_of(where: str, value: Any) -> str:
    """Return a value of a matrix as JSON, which is YAML. A path is text, and numbers of NumPy are numbers.

    Characters are written as themselves: YAML has no pairs of surrogates.

    Args:
        where: the argument that it was given in, for messages.

    Raises:
        ConfigurationError: YAML has nothing like it.
    """
    try:
        return json.dumps(
            value, default=lambda item: item.tolist() if hasattr(item, "tolist") else os.fspath(item), ensure_ascii=False
        )
    except (TypeError, ValueError):
        hint = "give numbers, texts, paths, lists or dictionaries"
        raise ConfigurationError(Problem(where, f"{value!r} is no value of a matrix", hint)) from None
