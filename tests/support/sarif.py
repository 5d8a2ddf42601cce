"""SARIF logs and JSON against what their standards allow."""

from __future__ import annotations

import json
from typing import Any

# Properties of the objects used here, from the SARIF 2.1.0 schema. An exclamation mark: the property is required. No others
# are allowed (additionalProperties: false): look up a new one in the schema and add it here.
SHAPES: dict[str, dict[str, Any]] = {
    "log": {"$schema": str, "version!": {"2.1.0"}, "runs!": ["run"]},
    "run": {
        "tool!": "tool",
        "automationDetails": "automation",
        "invocations": ["invocation"],
        "results": ["result"],
        "properties": dict,
    },
    "tool": {"driver!": "driver"},
    "driver": {"name!": str, "version": str, "rules": ["rule"]},
    "rule": {
        "id!": str,
        "shortDescription": "text",
        "fullDescription": "text",
        "help": "text",
        "defaultConfiguration": "configuration",
        "properties": dict,
    },
    "configuration": {"level": {"none", "note", "warning", "error"}},
    "text": {"text!": str},
    "automation": {"id": str},
    "invocation": {"executionSuccessful!": bool, "exitCode": int, "toolExecutionNotifications": ["notification"]},
    "notification": {
        "message!": "text",
        "level": {"none", "note", "warning", "error"},
        "associatedRule": "descriptor",
    },
    "descriptor": {"id": str, "index": int},
    "result": {
        "message!": "text",
        "ruleId": str,
        "ruleIndex": int,
        "level": {"none", "note", "warning", "error"},
        "locations": ["location"],
        "relatedLocations": ["location"],
        "stacks": ["stack"],
        "partialFingerprints": dict,
        "suppressions": ["suppression"],
        "baselineState": {"new", "unchanged", "updated", "absent"},
        "properties": dict,
    },
    "location": {"id": int, "physicalLocation": "physical", "logicalLocations": ["logical"], "message": "text"},
    "physical": {"artifactLocation": "artifact", "region": "region"},
    "region": {"startLine": int},
    "stack": {"message": "text", "frames!": ["frame"]},
    "frame": {"location": "location"},
    "artifact": {"uri": str},
    "logical": {"fullyQualifiedName": str, "kind": str},
    "suppression": {
        "kind!": {"inSource", "external"},
        "status": {"accepted", "underReview", "rejected"},
        "justification": str,
    },
}


def check_shape(value: Any, shape: Any, where: str = "log") -> None:
    """Check a SARIF log recursively for properties that the standard does not have, or requires and misses."""
    if isinstance(shape, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            check_shape(item, shape[0], f"{where}[{index}]")
    elif isinstance(shape, set):
        assert value in shape, where
    elif isinstance(shape, type):
        assert isinstance(value, shape), where
    else:
        properties = {name.rstrip("!"): (name.endswith("!"), kind) for name, kind in SHAPES[shape].items()}
        assert value.keys() <= properties.keys(), where
        for name, (required, kind) in properties.items():
            assert name in value or not required, f"{where}.{name}"
            if name in value:
                check_shape(value[name], kind, f"{where}.{name}")


def parse_strict(text: str) -> Any:
    """Parse JSON by the standard: Python would also accept NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)
