from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchbox.spec.schema import MatrixFile, json_schema
from benchbox.spec.train import TrainFile

MATRICES = Path(__file__).parents[3] / "matrices"
SCHEMAS = [(MATRICES, MatrixFile), (MATRICES / "train", TrainFile)]

REMEDY = (
    "python -c 'import json; from {module} import {name}; from benchbox.spec.schema import json_schema; "
    "print(json.dumps(json_schema({name}), indent=2))' > {path}"
)


@pytest.mark.parametrize(("folder", "model"), SCHEMAS)
def test_the_published_schema_is_the_one_that_files_are_checked_with(folder, model):
    path = folder / "schema.json"
    remedy = REMEDY.format(module=model.__module__, name=model.__name__, path=path.relative_to(MATRICES.parent))
    assert json.loads(path.read_text()) == json_schema(model), f"write it anew: {remedy}"


@pytest.mark.parametrize("folder", [folder for folder, _ in SCHEMAS])
def test_the_shipped_files_name_it_for_the_editor(folder):
    paths = list(folder.glob("*.yaml"))
    assert paths
    for path in paths:
        assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n"), path


def test_the_schema_of_training_files_has_every_section_with_its_hints():
    schema = json_schema(TrainFile)
    assert {"checkpoint", "audit", "trackers"} <= schema["properties"].keys()
    assert "exit code 4" in schema["$defs"]["AuditSection"]["properties"]["stop_on"]["description"]
    assert schema["additionalProperties"] is False
