"""Bounds of dependencies, the lowest versions that are tested, and when CI tests them again."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.compat import changes
from tests.compat.environments import ENVIRONMENTS, ROOT, find_python
from tests.compat.parts import BACKENDS, Result, summarise_cells, summarise_tests

LOWEST, HIGHEST = ENVIRONMENTS
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["lowbit"], *EXTRAS["test"])]
EVERY = [Requirement(text) for texts in (PROJECT["dependencies"], *EXTRAS.values()) for text in texts]


def pins(environment):
    lines = (line for line in environment.requirements.read_text().splitlines() if not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize("requirement", EVERY, ids=str)
def test_no_dependency_has_an_upper_bound(requirement):
    assert {specifier.operator for specifier in requirement.specifier} <= {">="}


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_the_lowest_versions_that_are_tested_are_the_bounds(requirement):
    """A bound below what the other requirements allow would promise what nothing can install."""
    (specifier,) = requirement.specifier
    bound, pin = Version(specifier.version), pins(LOWEST)[canonicalize_name(requirement.name)]
    assert pin.release[: len(bound.release)] == bound.release, "make compat-requirements, or correct the bound"


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_the_highest_versions_satisfy_the_bounds(requirement):
    assert pins(HIGHEST)[canonicalize_name(requirement.name)] in requirement.specifier


def test_the_lowest_python_is_the_bound_and_both_are_classified():
    assert PROJECT["requires-python"] == f">={LOWEST.python_version}"
    for environment in ENVIRONMENTS:
        assert f"Programming Language :: Python :: {environment.python_version}" in PROJECT["classifiers"]


def test_a_python_that_is_not_installed_is_named():
    with pytest.raises(RuntimeError, match=r"^Python 3\.99 is not installed$"):
        find_python("3.99")


@pytest.fixture
def checkout(tmp_path):
    """The files that decide what can be installed."""
    for path in (ROOT / "pyproject.toml", ROOT / "constraints.txt", LOWEST.requirements):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("pyproject.toml", '"torch>=', '"torch>=1'),
        ("pyproject.toml", 'requires-python = ">=3.11"', 'requires-python = ">=3.12"'),
        ("constraints.txt", "accelerate==", "accelerate==9."),
        (str(LOWEST.requirements.relative_to(ROOT)), "av==", "av==9"),
    ],
)
def test_a_changed_dependency_changes_the_digest(checkout, file, old, new):
    before = changes.dependencies_digest(checkout)
    path = checkout / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert changes.dependencies_digest(checkout) != before


def test_other_settings_leave_the_digest_unchanged(checkout):
    before = changes.dependencies_digest(checkout)
    path = checkout / "pyproject.toml"
    path.write_text(path.read_text().replace("line-length = 128", "line-length = 100"))
    assert changes.dependencies_digest(checkout) == before == changes.dependencies_digest()


def test_an_extra_counts_if_the_environments_install_it(checkout):
    before, path = changes.dependencies_digest(checkout), checkout / "pyproject.toml"
    text = path.read_text()
    path.write_text(text.replace("tensorboard>=", "tensorboard>=1"))
    assert changes.dependencies_digest(checkout) == before
    path.write_text(text.replace("torchao>=", "torchao>=1"))
    assert changes.dependencies_digest(checkout) != before


def test_only_passing_results_are_stated_as_tested(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "TESTED", tmp_path / "tested.json")
    assert changes.changed_since_tested(), "nothing was tested"
    passing = Result(passed=True, summary="5 passed")
    with pytest.raises(ValueError, match="cells"):
        changes.write_tested({}, {"unit tests": passing, "cells": replace(passing, passed=False)})
    changes.write_tested({"torch": "2.10.0"}, {"unit tests": passing})
    assert not changes.changed_since_tested()
    tested = json.loads(changes.TESTED.read_text())
    changes.TESTED.write_text(json.dumps(tested | {"digest": "of another checkout"}))
    assert changes.changed_since_tested()


JUNIT = '<testsuites><testsuite name="pytest">{}</testsuite></testsuites>'
CASES = {
    "passed": '<testcase classname="a" name="passed"/>',
    "failed": '<testcase classname="a" name="failed"><failure message="no"/></testcase>',
    "error": '<testcase classname="a" name="error"><error message="no"/></testcase>',
    "skipped": '<testcase classname="a" name="skipped"><skipped message="torch 2.10 lacks it"/></testcase>',
}


@pytest.mark.parametrize(
    ("cases", "exit_code", "passed", "summary"),
    [
        (("passed", "skipped"), 0, True, "1 passed, 0 failed, 1 skipped"),
        (("passed", "failed", "error"), 1, False, "1 passed, 2 failed, 0 skipped"),
        (("passed",), 3, False, "1 passed, 0 failed, 0 skipped"),
        (("skipped",), 0, False, "0 passed, 0 failed, 1 skipped"),
    ],
)
def test_unit_tests_pass_if_some_ran_and_none_failed(tmp_path, cases, exit_code, passed, summary):
    report = tmp_path / "report.xml"
    report.write_text(JUNIT.format("".join(CASES[case] for case in cases)))
    result = summarise_tests(report, exit_code)
    assert (result.passed, result.summary) == (passed, summary)
    assert result.failures == tuple(f"a::{case}" for case in cases if case in ("failed", "error"))
    assert result.skips == (("a::skipped: torch 2.10 lacks it",) if "skipped" in cases else ())


def test_pytest_that_wrote_no_report_failed(tmp_path):
    assert summarise_tests(tmp_path / "absent.xml", 4) == Result(
        passed=False, summary="pytest ended with exit code 4 and wrote no report"
    )


def test_cells_pass_if_all_backends_are_observed_as_requested():
    records = [{"cell": {"backend": name}, "status": "ok", "observed": {"backend": name}} for name in BACKENDS]
    assert summarise_cells(records, 0).passed
    assert summarise_cells(records[1:], 0).failures == ("ddp: no record, observed as None",)
    records[1] |= {"status": "crash", "observed": None}
    assert summarise_cells(records, 3).failures == ("fsdp2: crash, observed as None",)
    records[1] |= {"status": "ok", "observed": {"backend": "ddp"}}
    assert summarise_cells(records, 0).failures == ("fsdp2: ok, observed as ddp",)
