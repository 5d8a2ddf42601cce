"""Packages that add something to benchbox by entry points, installed by pip, and each addition run.

First the pages of docs/extending, followed to the letter: their files as printed, their commands as printed. Then a package of
a third party that adds a backend, a recipe, a metric, a rule and a policy at once. All commands are forks of one interpreter.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchbox.launch.process.warm import SHARED_SERVERS_VARIABLE
from tests.support.fork_servers import start_shared_server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.extensions.conftest import Environment

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "extending"
THIRD_PARTY = Path(__file__).parent / "third_party"
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

BACKEND, RECIPE, METRIC, RULE, POLICY = "acme_ddp_bf16", "acme_sgd", "acme_loss_drop", "ACME101", "acme_linear"
ADDED = {"backends": BACKEND, "recipes": RECIPE, "metrics": METRIC, "rules": RULE, "policies": POLICY}
MATRIX = f"""\
name: acme
size: tiny
data: synthetic
world_size: 2
batch: 2
policy: {POLICY}
axes:
  setup:
    - {{backend: ddp, recipe: fp32}}
    - {{backend: ddp, recipe: {RECIPE}}}
    - {{backend: {BACKEND}, recipe: fp32_autocast}}
    - {{backend: {BACKEND}, recipe: bf16_pure}}
measure: {{warmup_steps: 1, steps: 2, launches: 1}}
reference: {{backend: ddp, recipe: fp32}}
thresholds:
  - {{metric: {METRIC}, min: -1e9}}
"""
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


@dataclass(frozen=True)
class Installed:
    """A link on PYTHONPATH, to be set to what was installed, so that all commands share an interpreter and a fork server."""

    link: Path
    commands: subprocess.Popen[str]

    def pip_install(self, site: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Install into a folder of its own instead of the environment of the tests, without an index."""
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
        command = [sys.executable, "-m", "pip", "install", *options, *words]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)

    def benchbox(self, site: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run the command where this folder is on the path."""
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(site)
        output = self.link.with_name("output")
        errors = output.with_name("output.err")
        output.write_text("")
        errors.write_text("")
        assert self.commands.stdin
        assert self.commands.stdout
        print(json.dumps([arguments, str(cwd), str(output)]), file=self.commands.stdin, flush=True)
        code = int(self.commands.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, output.read_text(), errors.read_text())


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    link = tmp_path_factory.mktemp("site") / "installed"
    link.symlink_to(link.parent)  # processes that start before anything is installed would not look at a missing folder again
    sockets = Path(tempfile.mkdtemp())  # the path of a socket must be short
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PYTHONPATH": link, SHARED_SERVERS_VARIABLE: sockets, "COLUMNS": 200, "OMP_NUM_THREADS": 1}.items():
            patch.setenv(name, str(value))
        server = start_shared_server(sockets / "extending.sock", ranks=2, log=sockets / "log")
        forks = [sys.executable, Path(__file__).with_name("forked_commands.py")]
        with subprocess.Popen(forks, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as commands:
            yield Installed(link, commands)
        server.kill()
        server.wait()
    shutil.rmtree(sockets)


def follow(page: Page, folder: Path, installed: Installed) -> dict[str, str]:
    """Write the files, run the commands, and return the output of each."""
    for path, text in page.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    site = folder / "installed"
    site.mkdir()
    outputs = {}
    for words, expected in page.commands:
        if words[:2] == ["pip", "install"]:
            result = installed.pip_install(site, *words[2:], cwd=folder)
        else:
            assert words[0] == "benchbox", words
            result = installed.benchbox(site, *(_absolute(word) for word in words[1:]), cwd=folder)
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


def test_the_backend_page(tmp_path: Path, installed: Installed) -> None:
    outputs = follow(read_page("backend"), tmp_path, installed)
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


def test_the_recipe_page(tmp_path: Path, installed: Installed) -> None:
    outputs = follow(read_page("recipe"), tmp_path, installed)
    assert "\nfp32_amsgrad\n" in outputs["benchbox list recipes"]
    assert statuses(tmp_path, "recipe") == {"fp32": {"ok"}, "fp32_amsgrad": {"ok"}}
    with_amsgrad = {
        record["cell"]["recipe"]
        for record in records_of(tmp_path)
        if any(entry["kind"] == "max_exp_avg_sq" for entry in record["precision"]["census"])
    }
    assert with_amsgrad == {"fp32_amsgrad"}


def test_the_rule_page(tmp_path: Path, installed: Installed) -> None:
    outputs = list(follow(read_page("rule"), tmp_path, installed).values())
    explained, violated, clean = outputs[1:]
    assert "the second moment averages over fewer than 100 steps" in explained
    assert "ACME101 error" in violated
    assert "0.95" in violated
    assert clean.splitlines()[-1] == "clean: ACME101"


def test_the_metric_page(tmp_path: Path, installed: Installed) -> None:
    outputs = follow(read_page("metric"), tmp_path, installed)
    assert "\nsamples_per_s_per_rank\n" in outputs["benchbox list metrics"]
    assert "samples_per_s_per_rank" in outputs["benchbox check runs/my_matrix"]
    assert "samples_per_s_per_rank" in (tmp_path / "runs" / "my_matrix" / "report.html").read_text()


def test_the_policy_page(tmp_path: Path, installed: Installed) -> None:
    page = read_page("policy")
    assert {Path(path).name for path in page.files if path.startswith("my_policies/terse/")} == {"policy.py", "presets.yaml"}
    outputs = follow(page, tmp_path, installed)
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
    (of_speller,) = (output for command, output in outputs.items() if "name=speller" in command)
    assert of_speller.startswith("text: random tokens\n")
    assert {r["cell"]["backend"] for r in records if r["cell"]["policy"] == "terse"} == {"ddp", "fsdp2", "zero2"}


@pytest.mark.parametrize("name", ["policy", "backend", "recipe", "rule", "metric"])
def test_every_page_registers_what_it_adds(name: str) -> None:
    page = read_page(name)
    group = {"policy": "policies"}.get(name, f"{name}s")
    assert f'[project.entry-points."benchbox.{group}"]' in page.files["pyproject.toml"]
    assert any(words[:2] == ["pip", "install"] for words, _ in page.commands)
    assert any(words[0] == "benchbox" and words[1] in {"run", "audit-precision"} for words, _ in page.commands)


@dataclass(frozen=True, slots=True)
class ThirdParty:
    """The package of `third_party/`, installed, and a folder to work in that has its matrix."""

    site: Path
    work: Path
    installed: Installed

    def benchbox(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.installed.benchbox(self.site, *arguments, cwd=self.work)


@pytest.fixture(scope="module")
def third_party(tmp_path_factory: pytest.TempPathFactory, installed: Installed) -> ThirdParty:
    folder = tmp_path_factory.mktemp("acme")
    shutil.copytree(THIRD_PARTY, folder / "sources")  # a build leaves files behind
    package = ThirdParty(folder / "installed", folder / "work", installed)
    package.site.mkdir()
    package.work.mkdir()
    done = installed.pip_install(package.site, ".", cwd=folder / "sources")
    assert done.returncode == 0, done.stdout + done.stderr
    (package.work / "acme.yaml").write_text(MATRIX)
    return package


@pytest.fixture(scope="module")
def records(third_party: ThirdParty) -> dict[tuple[str, str], dict[str, Any]]:
    """(backend, recipe) -> the record of its launch."""
    done = third_party.benchbox("run", "acme.yaml", "--out", "runs/acme")
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = [json.loads(path.read_text()) for path in (third_party.work / "runs/acme").glob("cells/*/launch-1.json")]
    return {(record["cell"]["backend"], record["cell"]["recipe"]): record for record in loaded}


@pytest.mark.parametrize(("kind", "name"), ADDED.items())
def test_everything_added_is_listed(third_party: ThirdParty, kind: str, name: str) -> None:
    """Beside the built-in ones, which come first."""
    done = third_party.benchbox("list", kind, "--format", "json")
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(done.stdout)]
    assert name in names
    assert len(names) > 1


def test_a_plan_knows_the_limits_of_an_added_backend(third_party: ThirdParty) -> None:
    """Three cells run; the fourth is skipped with the reason that the third party gives."""
    done = third_party.benchbox("plan", "acme.yaml")
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "3 cells x 1 launch" in text
    assert f"{BACKEND} has no bf16_pure recipe: gradients of 16-bit parameters need no compression" in text


def test_every_cell_runs_and_the_records_are_sound(third_party: ThirdParty, records: dict) -> None:
    assert {key: record["status"] for key, record in records.items()} == {
        ("ddp", "fp32"): "ok",
        ("ddp", RECIPE): "ok",
        (BACKEND, "fp32_autocast"): "ok",
    }
    done = third_party.benchbox("verify", "runs/acme")
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_added_backend_is_observed_as_itself_and_a_built_in_one_as_itself(records: dict) -> None:
    """The record also says which structure the claim is about."""
    observed = {key: record["observed"] for key, record in records.items()}
    assert observed[BACKEND, "fp32_autocast"]["backend"] == BACKEND
    assert observed[BACKEND, "fp32_autocast"]["sharding"] == (
        "replicated, gradients all-reduced in bfloat16 (structure: ddp, replicated)"
    )
    assert observed["ddp", "fp32"]["backend"] == "ddp"
    assert observed["ddp", "fp32"]["sharding"] == "replicated"


def test_an_added_backend_does_what_it_says(records: dict) -> None:
    """Gradients compressed to bfloat16 travel in half the bytes."""
    plain, compressed = (
        sum(entry["bytes"] for name, entry in records[key]["collectives"].items() if "reduce" in name)
        for key in (("ddp", "fp32"), (BACKEND, "fp32_autocast"))
    )
    assert compressed < plain


def test_an_added_recipe_is_stepped_by_its_own_optimizer(records: dict) -> None:
    assert records["ddp", RECIPE]["observed"]["optimizer_chain"] == ["AcceleratedOptimizer", "SGD"]
    assert records["ddp", "fp32"]["observed"]["optimizer_chain"] == ["AcceleratedOptimizer", "AdamW"]


def test_an_added_rule_is_judged_in_every_cell_and_fires_where_it_should(records: dict) -> None:
    """SGD has no second moment, which the rule asks for. No built-in rule objects to the added backend."""
    fired = {key: [finding["code"] for finding in record["precision"]["findings"]] for key, record in records.items()}
    assert RULE in fired["ddp", RECIPE]
    assert RULE not in fired["ddp", "fp32"] + fired[BACKEND, "fp32_autocast"]
    assert all(RULE not in record["precision"]["not_judged"] for record in records.values())
    severe = [
        finding["code"]
        for finding in records[BACKEND, "fp32_autocast"]["precision"]["findings"]
        if finding["severity"] in ("error", "warning")
    ]
    assert severe == []


def test_an_added_metric_is_a_column_of_the_tables_and_can_be_a_threshold(third_party: ThirdParty, records: dict) -> None:
    with (third_party.work / "runs/acme/table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    losses = {key: record["loss"] for key, record in records.items()}
    assert {(row["backend"], row["recipe"]): float(row[METRIC]) for row in rows} == {
        key: pytest.approx(series[0] - series[-1]) for key, series in losses.items()
    }
    checked = third_party.benchbox("check", "runs/acme")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert METRIC in checked.stdout


@pytest.mark.exhaustive
def test_an_added_backend_that_fell_back_to_another_is_a_mismatch(acme: Environment) -> None:
    """The set-up without the hook is plain DDP, and that is what is observed, here in a virtual environment of its own."""
    (acme.work / "acme.yaml").write_text(MATRIX)
    only = f"backend={BACKEND},recipe=fp32_autocast"
    done = acme.benchbox("run", "acme.yaml", "--only", only, "--out", "runs/fallen", ACME_FALLS_BACK="1")
    assert done.returncode == 3, done.stdout + done.stderr
    (path,) = (acme.work / "runs/fallen").glob("cells/*/launch-1.json")
    record = json.loads(path.read_text())
    assert record["status"] == "mismatch", record["error"]
    assert f"requested backend {BACKEND}, observed ddp" in record["error"]["message"]
    assert record["throughput"] is None
