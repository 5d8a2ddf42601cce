from __future__ import annotations

import json
from pathlib import Path

from benchbox.spec.schema import json_schema

SCHEMA = Path(__file__).parents[3] / "matrices" / "schema.json"

REMEDY = (
    "python -c 'import json; from benchbox.spec.schema import json_schema; print(json.dumps(json_schema(), indent=2))'"
    " > matrices/schema.json"
)


def test_the_published_schema_is_the_one_that_matrices_are_checked_with():
    assert json.loads(SCHEMA.read_text()) == json_schema(), f"write it anew: {REMEDY}"


def test_the_shipped_matrices_name_it_for_the_editor():
    for path in SCHEMA.parent.glob("*.yaml"):
        assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n"), path
