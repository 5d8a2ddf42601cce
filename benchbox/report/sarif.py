"""Parts of a SARIF 2.1.0 log (OASIS standard, errata 01) that audits, gates and comparisons share."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from benchbox import __version__
from benchbox.analysis.certificates import LARGEST_BATCH
from benchbox.registry.metrics import metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif_log(rules: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]], **properties: Any) -> dict[str, Any]:
    """Return a log with one run of benchbox. `properties` are further keys of the run."""
    driver = {"name": "benchbox", "version": __version__, "rules": list(rules)}
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, **properties, "results": list(results)}],
    }


def metric_rules(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a rule for each metric by name; a name that is none is that of a ratio of benchmarks."""
    formulas = {name: metric.formula for name, metric in metrics().items()}
    formulas[LARGEST_BATCH] = "largest batch of a walk that fits in memory"
    ratio = "ratio of two measurements of a test in one process"
    return [
        {"id": name, "shortDescription": {"text": name}, "fullDescription": {"text": formulas.get(name, ratio)}}
        for name in names
    ]


def fingerprint(*parts: str) -> str:
    """Return a short hash of the parts of a result that stay equal from run to run, whatever is measured."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def file_uri(path: Path) -> str:
    """Return the URI of a file: relative if it is below the working directory."""
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return path.as_uri() if path.is_absolute() else quote(os.fsencode(path.as_posix()))


def file_location(uri: str) -> dict[str, Any]:
    return {"artifactLocation": {"uri": uri}}


def line_location(file: str, line: int) -> dict[str, Any]:
    return file_location(file_uri(Path(file))) | {"region": {"startLine": line}}
