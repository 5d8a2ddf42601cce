"""JUnit XML of one test suite, in the form that CI systems read."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Mapping


def junit_document(suite: ET.Element, counts: Mapping[str, int]) -> str:
    """Return a document with one suite, which gets the counts `tests`, `failures`, `errors` and `skipped`."""
    for name in ("tests", "failures", "errors", "skipped"):
        suite.set(name, str(counts.get(name, 0)))
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    document: bytes = ET.tostring(suites, encoding="us-ascii", xml_declaration=True)
    return document.decode("ascii")
