"""A comparison as JUnit XML: one test case for each figure of a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from benchbox.analysis.changes import UNSETTLED
from benchbox.report.comparison.view import sentence, summary_sentences
from benchbox.report.junit import junit_document
from benchbox.report.unprintable import escape_unprintable

if TYPE_CHECKING:
    from benchbox.analysis.changes import RunComparison


def render_junit(comparison: RunComparison) -> str:
    """Render a comparison as JUnit XML. A regression is a failure; what is not settled is skipped, with the reason."""
    title = escape_unprintable(f"benchbox compare: {comparison.head} against {comparison.base}")
    suite = ET.Element("testsuite", name=title)
    for change in comparison.changes:
        name = escape_unprintable(f"{change.metric} of {change.cell}")
        case = ET.SubElement(suite, "testcase", classname="benchbox.compare", name=name, time="0")
        text = escape_unprintable(sentence(change))
        if change.verdict == "regression":
            ET.SubElement(case, "failure", type="regression", message=text).text = text
        elif change.verdict in UNSETTLED:
            ET.SubElement(case, "skipped", message=text)
        else:
            ET.SubElement(case, "system-out").text = text
    counts = {
        "tests": len(comparison.changes),
        "failures": len(comparison.of_verdict("regression")),
        "skipped": len(comparison.of_verdict(*UNSETTLED)),
    }
    ET.SubElement(suite, "system-out").text = "\n".join(map(escape_unprintable, summary_sentences(comparison)))
    return junit_document(suite, counts)
