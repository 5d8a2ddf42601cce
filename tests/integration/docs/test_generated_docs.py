"""Generated documentation: what is committed is what the code gives today."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[3]
GENERATED = ("architecture.svg", "reference.md")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    # A narrow terminal and another hash seed must not change the output.
    environment = {**os.environ, "COLUMNS": "43", "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, str(ROOT / "docs" / "generate"), str(folder)], check=True, env=environment, timeout=120)
    return folder


@pytest.mark.parametrize("name", GENERATED)
def test_the_committed_file_is_what_make_docs_writes(regenerated: Path, name: str) -> None:
    assert (regenerated / name).read_bytes() == (ROOT / "docs" / name).read_bytes(), f"docs/{name} is outdated: run `make docs`"


def test_every_key_of_a_matrix_is_documented_with_its_default(regenerated: Path) -> None:
    schema = json.loads((ROOT / "matrices" / "schema.json").read_text())
    measured = (f"measure.{key}" for key in schema["$defs"]["MeasureFile"]["properties"])
    text = (regenerated / "reference.md").read_text()
    assert [key for key in (*schema["properties"], *measured) if f"\n| `{key}` |" not in text] == []
    assert "| `thresholds.severity` | error, warning | error | " in text
    assert "| `measure.hang_after_s` | number | 120.0 | " in text
    assert "| `cams` | integer | 1 | Cameras of every sample: the first of the dataset" in text


def test_every_key_of_a_training_file_is_documented_with_its_default(regenerated: Path) -> None:
    schema = json.loads((ROOT / "matrices" / "train" / "schema.json").read_text())
    matrix, _, training = (regenerated / "reference.md").read_text().partition("## Keys of a training file")
    missing = [key for key in schema["properties"] if f"\n| `{key}` |" not in training and f"\n| `{key}` |" not in matrix]
    assert missing == []
    assert "| `checkpoint.every` | integer | 1000 | Steps between checkpoints" in training
    assert "| `validation.batch` | integer |  | " in training
    assert "| `optim.lr`" not in training, "keys that a matrix has as well are above"


def test_help_has_a_whole_sentence_on_every_verb(regenerated: Path) -> None:
    reference = (regenerated / "reference.md").read_text()
    summaries = re.findall(r"^  [a-z-]+ {2,}(.*)$", "".join(reference.split("Commands:\n")[1:]), re.MULTILINE)
    assert len(summaries) > 20
    assert [summary for summary in summaries if summary.endswith("...")] == []


def test_every_verb_is_documented(regenerated: Path) -> None:
    listing = subprocess.run(
        [sys.executable, "-m", "benchbox.cli.app", "--help"], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    verbs = re.findall(r"^  ([a-z-]+)\s", listing.partition("Commands:\n")[2], re.MULTILINE)
    headings = re.findall(r"^### benchbox (.+)$", (regenerated / "reference.md").read_text(), re.MULTILINE)
    assert len(verbs) > 10
    assert [verb for verb in verbs if verb not in headings] == []
    assert {"baseline promote", "data record", "data inspect", "data convert"} <= set(headings)


def test_the_picture_has_a_box_for_every_folder_on_the_floor_of_the_contract(
    regenerated: Path, graph_module: ModuleType
) -> None:
    graph = graph_module.read_import_graph(ROOT)
    picture = ET.parse(regenerated / "architecture.svg").getroot()
    labels = [element for element in picture.iter(f"{SVG}text") if element.get("class") == "name"]
    heights = {label.text: int(label.get("y", "")) for label in labels}
    assert len(labels) == len(heights)
    assert set(heights) == {folder for floor in graph.floors for folder in floor}
    assert [len({heights[folder] for folder in floor}) for floor in graph.floors] == [1] * len(graph.floors)
    tops = [heights[floor[0]] for floor in graph.floors]
    assert tops == sorted(set(tops))


@pytest.fixture
def graph_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "generate"))
    import import_graph

    return import_graph


CONTRACT = """
[tool.importlinter]
root_package = "pkg"
[[tool.importlinter.contracts]]
type = "layers"
layers = ["cli", "store | plan", "errors"]
[[tool.importlinter.contracts]]
type = "forbidden"
source_modules = ["pkg.plan"]
forbidden_modules = ["numpy"]
[[tool.importlinter.contracts]]
type = "forbidden"
source_modules = ["pkg.store"]
forbidden_modules = ["torch", "accelerate"]
"""


def write_package(root: Path, **sources: str) -> Path:
    (root / "pyproject.toml").write_text(CONTRACT)
    for folder in ("cli", "store", "plan"):
        (root / "pkg" / folder).mkdir(parents=True)
    (root / "pkg" / "errors.py").write_text("")
    for name, source in sources.items():
        (root / "pkg" / name / "module.py").write_text(source)
    return root


def test_imports_between_folders_are_read_from_the_source(tmp_path: Path, graph_module: Any) -> None:
    root = write_package(
        tmp_path,
        cli="from pkg.store.files import read\n\ndef verb():\n    from pkg import plan\n    from pkg.errors import Problem\n",
        store="import pkg.errors\n",
        plan="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.errors import Problem\n",
    )
    graph = graph_module.read_import_graph(root)
    assert graph.floors == (("cli",), ("store", "plan"), ("errors",))
    assert graph.torch_free == {"store"}
    assert graph.imports == {("cli", "store"), ("cli", "plan"), ("cli", "errors"), ("store", "errors")}
    assert graph.direct_imports() == [("cli", "plan"), ("cli", "store"), ("store", "errors")]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"store": "import pkg.cli\n"}, "pkg.store imports pkg.cli"),
        ({"store": "import pkg.plan\n"}, "pkg.store imports pkg.plan"),
        ({"new": "import pkg.errors\n"}, "new is in no layer"),
    ],
)
def test_a_graph_that_breaks_the_contract_is_not_drawn(
    tmp_path: Path, graph_module: Any, sources: dict[str, str], message: str
) -> None:
    (tmp_path / "pkg" / "new").mkdir(parents=True)
    root = write_package(tmp_path, **sources)
    with pytest.raises(ValueError, match=re.escape(message)):
        graph_module.read_import_graph(root)
