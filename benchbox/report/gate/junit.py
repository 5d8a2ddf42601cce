"""A gate as JUnit XML: one test case for each demand."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from benchbox.report.gate.view import row_sentence
from benchbox.report.junit import junit_document
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from benchbox.report.gate.view import GateView

_FAILED = ("breach", "missing")


def render_gate_junit(view: GateView) -> str:
    """Render a gate as JUnit XML. A breach or a missing value is a failure, what launches do not settle is skipped."""
    suite = ET.Element("testsuite", name=f"benchbox check: {escape_unprintable(view.path)}")
    for row in view.rows:
        name = escape_unprintable(f"{row.metric} of {row.cell}: {row.expected}")
        case = ET.SubElement(suite, "testcase", classname="benchbox.check", name=name, time="0")
        text = escape_unprintable(row_sentence(row))
        if row.verdict in _FAILED:
            ET.SubElement(case, "failure", type=row.verdict, message=text).text = text
        elif row.verdict == "inconclusive":
            ET.SubElement(case, "skipped", message=text)
        else:
            ET.SubElement(case, "system-out").text = text
    ET.SubElement(suite, "system-out").text = escape_unprintable(view.summary)
    counts = {
        "tests": len(view.rows),
        "failures": sum(row.verdict in _FAILED for row in view.rows),
        "skipped": sum(row.verdict == "inconclusive" for row in view.rows),
    }
    return junit_document(suite, counts)
