"""Tests of rules from the entry-point group `benchbox.rules` of an installed distribution."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from benchbox.audit.judge import judge
from benchbox.audit.rules import rule, rules
from benchbox.audit.selection import Selection, parse_codes
from benchbox.cli.app import app
from benchbox.errors import ConfigurationError
from tests.support.distributions import write_distribution
from tests.support.facts import ranks

SOURCE = """
from benchbox.audit.rules.base import Rule, RuleViolation


def check_world_size(facts):
    if facts and facts[0].world_size > 1:
        yield RuleViolation("error", "world", facts[0].rank, {"world size": facts[0].world_size})


def acme_rule(code):
    return Rule(
        code=code,
        title="more than one rank trains",
        severity="error",
        rationale="one rank is enough for everybody",
        measurement="the world size",
        repair="use one rank",
        references=("acme#1",),
        sections=(),
        check=check_world_size,
    )


single = acme_rule("ACME101")
several = [acme_rule("ACME102"), acme_rule("ACME103")]
duplicate = acme_rule("BXP101")
twice = [acme_rule("ACME104"), acme_rule("ACME104")]
lower_case = acme_rule("acme101")
no_digits = acme_rule("ACME")
number = 3
strings = ["ACME101"]
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a distribution with these entry points on the path, and return to the built-in rules afterwards."""

    def installed(*values: str, name: str = "acme-rules") -> None:
        (tmp_path / "acme_rules.py").write_text(SOURCE)
        entries = {f"entry{index}": value for index, value in enumerate(values)}
        write_distribution(tmp_path, name, "benchbox.rules", entries)
        monkeypatch.syspath_prepend(str(tmp_path))
        rules.cache_clear()

    yield installed
    sys.modules.pop("acme_rules", None)
    monkeypatch.undo()
    rules.cache_clear()


def test_a_rule_of_another_distribution_is_selected_and_fires(install):
    install("acme_rules:single")
    (code,) = parse_codes(["acme"], "--select")
    (finding,) = judge(ranks(), Selection(select=(code,))).findings
    assert (finding.code, finding.severity, finding.where) == ("ACME101", "error", "world")
    assert (finding.evidence, finding.repair) == ({"world size": 2}, "use one rank")
    assert "ACME101" not in {finding.code for finding in judge(ranks(world_size=1)).findings}


def test_it_is_listed_and_explained(install):
    install("acme_rules:single")
    listing = CliRunner().invoke(app, ["list", "rules"])
    assert listing.exit_code == 0
    assert any("ACME101" in line and "more than one rank trains" in line for line in listing.output.splitlines())
    explanation = CliRunner().invoke(app, ["explain", "acme101"])
    assert explanation.exit_code == 0
    for text in ("one rank is enough for everybody", "the world size", "use one rank", "acme#1"):
        assert text in explanation.output


def test_an_entry_point_may_provide_several_rules(install):
    built_in = rules().keys()
    install("acme_rules:single", "acme_rules:several")
    assert rules().keys() - built_in == {"ACME101", "ACME102", "ACME103"}
    assert list(rules()) == sorted(rules())
    assert rule("acme103").code == "ACME103"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("acme_rules:duplicate", "takes the name 'BXP101', which belongs to benchbox itself"),
        ("acme_rules:twice", "takes the name 'ACME104', which belongs to acme-rules"),
        ("acme_rules:lower_case", "has the code 'acme101', which is not upper-case letters followed by digits"),
        ("acme_rules:no_digits", "has the code 'ACME', which is not upper-case letters followed by digits"),
        ("acme_rules:number", "is an object of int, not a benchbox.audit.rules.base.Rule"),
        ("acme_rules:strings", "is an object of str, not a benchbox.audit.rules.base.Rule"),
        ("acme_rules:missing", "cannot be loaded: AttributeError"),
        ("acme_gone", "cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_an_unusable_entry_point_is_refused_by_its_name_and_distribution(install, value, message):
    install(value)
    with pytest.raises(ConfigurationError) as error:
        rules()
    (problem,) = error.value.problems
    assert problem.where == "acme-rules, entry point benchbox.rules: entry0"
    assert problem.message.startswith(f"{value} {message}")
    assert problem.hint == "update or repair acme-rules, or pip uninstall it"


def test_two_distributions_cannot_use_the_same_code(install):
    install("acme_rules:single")
    install("acme_rules:single", name="acme-rules-copy")
    with pytest.raises(ConfigurationError, match=r"acme-rules-copy, .* takes the name 'ACME101', which belongs to acme-rules;"):
        rules()
