"""The invariant of the section `precision` of a record: it is what the facts that the ranks wrote give."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from benchbox.analysis.run_invariants import LaunchFolders, RunInvariant
from benchbox.audit.record import build_precision_record, facts_file, read_facts
from benchbox.launch.fingerprint import benchbox_sha256
from benchbox.store.files import json_text

if TYPE_CHECKING:
    from pathlib import Path

    from benchbox.registry.launch_record import LaunchRecord

_BUILT_IN = "BXP"  # start of the codes of rules: those of other distributions may be installed or not


def as_facts_give(record: LaunchRecord, folder: Path) -> list[str] | None:
    """Return what differs from the precision that the facts of the ranks give, or None where there are no such files.

    Other sources of benchbox may judge the same facts otherwise: of their records, findings are not compared.
    """
    precision, ranks = record["precision"], record["cell"]["world_size"]
    if precision is None or not all((folder / facts_file(rank)).is_file() for rank in range(ranks)):
        return None
    rebuilt = json.loads(json_text(build_precision_record(read_facts(folder, ranks))))
    judged_here = (record["environment"] or {}).get("benchbox_sha256") == benchbox_sha256()
    sides = [_comparable(side, judged=judged_here) for side in (precision, rebuilt)]
    return [f"precision.{key} differs from the facts of its ranks" for key in sides[1] if sides[0][key] != sides[1][key]]


def _comparable(precision: Any, *, judged: bool) -> dict[str, Any]:
    facts = {key: precision.get(key) for key in ("census", "numbers", "problems")}
    if not judged:
        return facts
    findings = [finding for finding in precision["findings"] if finding["code"].startswith(_BUILT_IN)]
    not_judged = {code: why for code, why in precision.get("not_judged", {}).items() if code.startswith(_BUILT_IN)}
    return {**facts, "findings": findings, "not_judged": not_judged}


FACTS_INVARIANT = RunInvariant("precision is what the facts of the ranks give", partial(LaunchFolders, compare=as_facts_give))
