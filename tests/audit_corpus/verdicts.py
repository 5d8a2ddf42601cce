"""Compare the audit of a case with the expected outcome, and its run with the run without the audit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.audit_corpus.cases import Case
    from tests.audit_corpus.execution import Execution

_LOUD = ("warning", "error", "unknown")
_EXIT_FINE, _EXIT_NOT_OBSERVED, _EXIT_FINDINGS = 0, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Row of the table. A field is None where it could not be determined; `remarks` then say why."""

    name: str
    environment: str
    mistake: str | None
    expected: tuple[str, ...]
    verdict: str  # found, silent, missed, another repair, false alarm, failed
    findings: tuple[str, ...]  # lines "BXP101 error: title"
    checksums_equal: bool | None
    cpu_alone_s: float
    cpu_audited_s: float
    remarks: tuple[str, ...] = ()

    @property
    def right(self) -> bool:
        return self.verdict in ("found", "silent") and self.checksums_equal is True

    @property
    def cpu_ratio(self) -> float | None:
        return self.cpu_audited_s / self.cpu_alone_s if self.cpu_alone_s else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"right": self.right, "cpu_ratio": self.cpu_ratio}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Verdict:
        fields = {name: content[name] for name in cls.__slots__}
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


def loud_codes(findings: Sequence[Mapping[str, Any]], *, info: bool = False) -> set[str]:
    """Return the codes of findings at warning or above, or of all findings."""
    return {finding["code"] for finding in findings if info or finding["severity"] in _LOUD}


def judge_findings(case: Case, findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the verdict on the findings of an audit that observed the steps."""
    codes = loud_codes(findings)
    if codes - {*case.codes, *case.also}:
        return "false alarm"
    if not case.codes:
        return "silent"
    if not loud_codes(findings, info=case.info) & set(case.codes):
        return "missed"
    repairs = [finding["repair"] for finding in findings if finding["code"] in case.codes]
    return "found" if any(case.repair in repair for repair in repairs) else "another repair"


def compare(case: Case, alone: Execution, audited: Execution, repeated: Execution | None) -> Verdict:
    """Return the row of a case.

    Args:
        case: its expectations.
        alone: the run without the audit.
        audited: the run under the audit, with a report in JSON on stdout.
        repeated: a second run without the audit, where the checksums of the two above differ.
    """
    remarks: list[str] = []
    report = _read_report(audited)
    findings = report["findings"] if report else []
    verdict = judge_findings(case, findings)
    if alone.exit_code != 0:
        verdict = "failed"
        remarks.append(f"without the audit, {_describe_end(case, alone)}")
    elif audited.exit_code == _EXIT_NOT_OBSERVED and case.unobserved:
        remarks.append(_closing_line(audited.stderr))
    elif report is None or audited.exit_code not in (_EXIT_FINE, _EXIT_FINDINGS):
        verdict = "failed"
        remarks.append(f"under the audit, {_describe_end(case, audited)}")
    elif audited.exit_code == _EXIT_FINDINGS and verdict == "silent":
        verdict = "false alarm"
        remarks.append(f"exit code 4: {_closing_line(audited.stderr)}")
    equal: bool | None = alone.checksums == audited.checksums != []
    if not alone.checksums:
        equal = None
        remarks.append("the script printed no checksums")
    elif not equal and repeated is not None and repeated.checksums != alone.checksums:
        equal = None
        remarks.append("two runs without the audit differ as well")
    return Verdict(
        name=case.name,
        environment=case.environment,
        mistake=case.mistake,
        expected=case.codes,
        verdict=verdict,
        findings=tuple(_describe(finding) for finding in findings if finding["severity"] in _LOUD or case.info),
        checksums_equal=equal,
        cpu_alone_s=round(alone.cpu_s, 2),
        cpu_audited_s=round(audited.cpu_s, 2),
        remarks=tuple(remarks),
    )


def _describe(finding: Mapping[str, Any]) -> str:
    return f"{finding['code']} {finding['severity']}: {finding['title']} {json.dumps(finding.get('evidence', {}))[:300]}"


def _read_report(audited: Execution) -> dict[str, Any] | None:
    try:
        return dict(json.loads(audited.stdout))
    except ValueError:
        return None


def _describe_end(case: Case, execution: Execution) -> str:
    if execution.exit_code is None:
        return f"it did not end within {case.timeout_s} s"
    return f"it exits with {execution.exit_code}: {_closing_line(execution.stderr)}"


def _closing_line(text: str) -> str:
    """Return the last line that names an error, or the last line."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or line.startswith("error: ")]
    return (errors or lines or ["no output"])[-1]
