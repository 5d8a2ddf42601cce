"""The pages of docs/extending, followed to the letter: their files as printed, their commands as printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchbox.launch.process.warm import SHARED_SERVERS_VARIABLE
from tests.support.fork_servers import start_shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "extending"
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.ranks


@dataclass(frozen=True)
class Page:
    """Files (path -> text) and commands (words, expected exit code) of a page, in their order."""

    files: dict[str, str]
    commands: list[tuple[list[str], int]]


def read_page(name: str) -> Page:
    files, commands = {}, []
    for block in BLOCK.finditer((PAGES / f"{name}.md").read_text()):
        if block["language"]:
            first_line, text = block["text"].split("\n", 1)
            files[first_line.removeprefix("# ")] = text
        else:
            commands += [read_command(line) for line in block["text"].splitlines()]
    return Page(files, commands)


def read_command(line: str) -> tuple[list[str], int]:
    command, _, comment = line.partition(" # ")
    expected = re.fullmatch(r"exit code (\d+)", comment.strip())
    return shlex.split(command), int(expected[1]) if expected else 0


@pytest.fixture(scope="module")
def on_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a link on PYTHONPATH, to be set to what a page installs, so that commands of all pages share a fork server."""
    link = tmp_path_factory.mktemp("site") / "installed"
    sockets = Path(tempfile.mkdtemp())  # the path of a socket must be short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PYTHONPATH": link, SHARED_SERVERS_VARIABLE: sockets, "COLUMNS": 200, "OMP_NUM_THREADS": 1}.items():
            patch.setenv(name, str(value))
        server = start_shared_server(sockets / "extending.sock", ranks=2, log=sockets / "log")
        yield link
        server.kill()
        server.wait()
    shutil.rmtree(sockets)


def follow(page: Page, folder: Path, on_path: Path) -> dict[str, str]:
    """Write the files, run the commands, and return the output of each.

    `pip install .` installs into a folder of its own instead of the environment of the tests.
    """
    for path, text in page.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    site = folder / "installed"
    site.mkdir()
    on_path.unlink(missing_ok=True)
    on_path.symlink_to(site)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    outputs = {}
    for words, expected in page.commands:
        if words[:2] == ["pip", "install"]:
            command = [*pip, "--target", str(site), *words[2:]]
        else:
            assert words[0] == "benchbox", words
            command = [str(Path(sys.executable).parent / "benchbox"), *(_absolute(word) for word in words[1:])]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert result.returncode == expected, f"{shlex.join(words)}\n{result.stdout}{result.stderr}"
        outputs[" ".join(words)] = result.stdout
    return outputs


def _absolute(word: str) -> str:
    """Matrices of the repository are named relative to it, and commands run elsewhere."""
    return str(ROOT / word) if word.startswith("matrices/") else word


def records_of(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((folder / "runs").rglob("launch-1.json"))]


def statuses(folder: Path, field: str) -> dict[str, set[str]]:
    """Statuses of all records, by a field of their cell."""
    by_value: dict[str, set[str]] = {}
    for record in records_of(folder):
        by_value.setdefault(record["cell"][field], set()).add(record["status"])
    return by_value


def test_the_backend_page(tmp_path: Path, on_path: Path) -> None:
    outputs = follow(read_page("backend"), tmp_path, on_path)
    assert "\nddp_bf16\n" in outputs["benchbox list backends"]
    assert statuses(tmp_path, "backend") == {"ddp": {"ok"}, "ddp_bf16": {"ok"}}
    observed = {record["cell"]["backend"]: record["observed"]["backend"] for record in records_of(tmp_path)}
    assert observed == {"ddp": "ddp", "ddp_bf16": "ddp_bf16"}
    reduced = {
        record["cell"]["backend"]: {
            entry["dtype"]
            for entry in record["precision"]["census"]
            if entry["kind"] == "reduction" and entry["elements"] > 1000
        }
        for record in records_of(tmp_path)
    }
    assert reduced == {"ddp": {"float32"}, "ddp_bf16": {"bfloat16"}}


def test_the_recipe_page(tmp_path: Path, on_path: Path) -> None:
    outputs = follow(read_page("recipe"), tmp_path, on_path)
    assert "\nfp32_amsgrad\n" in outputs["benchbox list recipes"]
    assert statuses(tmp_path, "recipe") == {"fp32": {"ok"}, "fp32_amsgrad": {"ok"}}
    with_amsgrad = {
        record["cell"]["recipe"]
        for record in records_of(tmp_path)
        if any(entry["kind"] == "max_exp_avg_sq" for entry in record["precision"]["census"])
    }
    assert with_amsgrad == {"fp32_amsgrad"}


def test_the_rule_page(tmp_path: Path, on_path: Path) -> None:
    outputs = list(follow(read_page("rule"), tmp_path, on_path).values())
    explained, violated, clean = outputs[1:]
    assert "the second moment averages over fewer than 100 steps" in explained
    assert "ACME101 error" in violated
    assert "0.95" in violated
    assert clean.splitlines()[-1] == "clean: ACME101"


def test_the_metric_page(tmp_path: Path, on_path: Path) -> None:
    outputs = follow(read_page("metric"), tmp_path, on_path)
    assert "\nsamples_per_s_per_rank\n" in outputs["benchbox list metrics"]
    assert "samples_per_s_per_rank" in outputs["benchbox check runs/my_matrix"]
    assert "samples_per_s_per_rank" in (tmp_path / "runs" / "my_matrix" / "report.html").read_text()


def test_the_policy_page(tmp_path: Path, on_path: Path) -> None:
    outputs = follow(read_page("policy"), tmp_path, on_path)
    assert "terse\n" in outputs["benchbox list policies"]
    assert statuses(tmp_path, "policy") == {"chunker": {"ok"}, "speller": {"ok"}, "terse": {"ok"}}
    records = records_of(tmp_path)
    chunker = [record for record in records if record["cell"]["policy"] == "chunker"]
    set_ups = {(record["cell"]["backend"], record["cell"]["checkpointing"]) for record in chunker}
    assert set_ups == {(backend, checkpointing) for backend in ("ddp", "fsdp2", "zero2") for checkpointing in (False, True)}
    assert {record["cell"]["attention"] for record in chunker} == {"native"}
    recomputed = {(record["cell"]["checkpointing"], record["observed"]["checkpointed_modules"]) for record in chunker}
    assert recomputed == {(False, 0), (True, 2)}
    for record in chunker:
        assert record["observed"]["unused_parameters"] == []
        assert [f for f in record["precision"]["findings"] if f["severity"] != "info"] == [], record["cell"]["backend"]
    assert [r["cell"]["backend"] for r in records if r["cell"]["policy"] == "speller"] == ["zero3"]
    assert {r["cell"]["backend"] for r in records if r["cell"]["policy"] == "terse"} == {"ddp", "fsdp2", "zero2"}


@pytest.mark.parametrize("name", ["policy", "backend", "recipe", "rule", "metric"])
def test_every_page_registers_what_it_adds(name: str) -> None:
    page = read_page(name)
    group = {"policy": "policies"}.get(name, f"{name}s")
    assert f'[project.entry-points."benchbox.{group}"]' in page.files["pyproject.toml"]
    assert any(words[:2] == ["pip", "install"] for words, _ in page.commands)
    assert any(words[0] == "benchbox" and words[1] in {"run", "audit-precision"} for words, _ in page.commands)
