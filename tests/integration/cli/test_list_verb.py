from __future__ import annotations

import json
import textwrap

import pytest

from benchbox.audit.rules import rules
from benchbox.registry.backends import backends
from benchbox.registry.freezing import FREEZE_PRESETS
from benchbox.registry.metrics import metrics
from benchbox.registry.recipes import recipes


@pytest.mark.parametrize(
    ("kind", "names"), [("backends", backends()), ("recipes", recipes()), ("freezing", FREEZE_PRESETS), ("metrics", metrics())]
)
def test_every_registered_name_is_listed(benchbox, kind, names):
    text = benchbox("list", kind).stdout
    assert [line for line in text.splitlines() if not line.startswith(" ")] == list(names)
    rows = json.loads(benchbox("list", kind, "--format", "json").stdout)
    assert [row["name"] for row in rows] == list(names)


def test_a_backend_says_what_it_cannot_do(benchbox):
    rows = {row["name"]: row for row in json.loads(benchbox("list", "backends", "--format", "json").stdout)}
    assert rows["hsdp"]["limits"] == ["at least 4 ranks", "a multiple of shard_size ranks, 2 by default"]
    assert any("checkpointing" in limit for limit in rows["zero3"]["limits"])


def test_policies_of_this_directory_and_of_policy_dir_are_listed_with_their_sizes(benchbox, tmp_path):
    for root, name in (("policies", "near"), ("further", "far")):
        folder = tmp_path / root / name
        folder.mkdir(parents=True)
        (folder / "policy.py").write_text('"""A policy: it is\n\nexplained further."""' if name == "near" else "def")
        (folder / "presets.yaml").write_text("tiny: {}\nfull: {}\n")
    text = benchbox("list", "policies", "--policy-dir", tmp_path / "further").stdout
    assert "far\n    tiny, full\n" in text
    assert "near\n    A policy: it is\n    tiny, full\n" in text


def test_every_policy_is_described_by_the_first_line_of_its_docstring(benchbox):
    rows = json.loads(benchbox("list", "policies", "--format", "json").stdout)
    assert all(row["summary"].endswith(".") for row in rows)
    assert "arXiv:2504.16054" in next(row["summary"] for row in rows if row["name"] == "pi05")


def test_unreadable_presets_are_reported_with_file_and_line(benchbox, tmp_path):
    folder = tmp_path / "policies" / "broken"
    folder.mkdir(parents=True)
    (folder / "policy.py").touch()
    (folder / "presets.yaml").write_text(textwrap.dedent("tiny: {a: 1\nfull: [\n"))
    result = benchbox("list", "policies")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {folder}/presets.yaml:2:")
    assert "not YAML" in result.stderr


def test_an_unknown_kind_is_refused_with_the_known_ones(benchbox):
    result = benchbox("list", "polices")
    assert result.returncode == 2
    assert "'policies'" in result.stderr


def test_rules_are_listed_one_a_line_and_each_can_be_explained(benchbox):
    rows = json.loads(benchbox("list", "rules", "--format", "json").stdout)
    assert [row["name"] for row in rows] == list(rules())
    lines = benchbox("list", "rules").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[row["name"], row["severity"]] for row in rows]
    text = benchbox("explain", "bxp101").stdout
    assert text.startswith(f"BXP101 error: {rules()['BXP101'].title}\n")
    flat = " ".join(text.split())
    for part in (rules()["BXP101"].rationale, rules()["BXP101"].measurement, rules()["BXP101"].repair, "OpenTau#181"):
        assert part in flat


def test_an_unknown_rule_is_one_line_with_a_suggestion(benchbox):
    done = benchbox("explain", "BXP1O1")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: unknown rule 'BXP1O1'; did you mean 'BXP101'?\n")
