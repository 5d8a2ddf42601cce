"""A package of a third party adds a backend, a recipe, a metric, a rule and a policy by entry points, and each is run."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.extensions.conftest import Environment

pytestmark = pytest.mark.ranks

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


@pytest.fixture(scope="module")
def matrix(acme: Environment) -> Path:
    path = acme.work / "acme.yaml"
    path.write_text(MATRIX)
    return path


@pytest.fixture(scope="module")
def records(acme: Environment, matrix: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(backend, recipe) -> the record of its launch."""
    done = acme.benchbox("run", matrix, "--out", "runs/acme")
    assert done.returncode == 0, done.stdout + done.stderr
    loaded = [json.loads(path.read_text()) for path in (acme.work / "runs/acme").glob("cells/*/launch-1.json")]
    return {(record["cell"]["backend"], record["cell"]["recipe"]): record for record in loaded}


@pytest.mark.parametrize(("kind", "name"), ADDED.items())
def test_everything_added_is_listed(acme: Environment, kind: str, name: str) -> None:
    """Beside the built-in ones, which come first."""
    done = acme.benchbox("list", kind, "--format", "json")
    assert done.returncode == 0, done.stderr
    names = [row["name"] for row in json.loads(done.stdout)]
    assert name in names
    assert len(names) > 1


def test_a_plan_knows_the_limits_of_an_added_backend(acme: Environment, matrix: Path) -> None:
    """Three cells run; the fourth is skipped with the reason that the third party gives."""
    done = acme.benchbox("plan", matrix)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "3 cells x 1 launches" in text
    assert f"{BACKEND} has no bf16_pure recipe: gradients of 16-bit parameters need no compression" in text


def test_every_cell_runs_and_the_records_are_sound(acme: Environment, records: dict) -> None:
    assert {key: record["status"] for key, record in records.items()} == {
        ("ddp", "fp32"): "ok",
        ("ddp", RECIPE): "ok",
        (BACKEND, "fp32_autocast"): "ok",
    }
    done = acme.benchbox("verify", "runs/acme")
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


def test_an_added_metric_is_a_column_of_the_tables_and_can_be_a_threshold(acme: Environment, records: dict) -> None:
    with (acme.work / "runs/acme/table.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    losses = {key: record["loss"] for key, record in records.items()}
    assert {(row["backend"], row["recipe"]): float(row[METRIC]) for row in rows} == {
        key: pytest.approx(series[0] - series[-1]) for key, series in losses.items()
    }
    checked = acme.benchbox("check", "runs/acme")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert METRIC in checked.stdout


@pytest.mark.exhaustive
def test_an_added_backend_that_fell_back_to_another_is_a_mismatch(acme: Environment, matrix: Path) -> None:
    """The set-up without the hook is plain DDP, and that is what is observed."""
    only = f"backend={BACKEND},recipe=fp32_autocast"
    done = acme.benchbox("run", matrix, "--only", only, "--out", "runs/fallen", ACME_FALLS_BACK="1")
    assert done.returncode == 3, done.stdout + done.stderr
    (path,) = (acme.work / "runs/fallen").glob("cells/*/launch-1.json")
    record = json.loads(path.read_text())
    assert record["status"] == "mismatch", record["error"]
    assert f"requested backend {BACKEND}, observed ddp" in record["error"]["message"]
    assert record["throughput"] is None
