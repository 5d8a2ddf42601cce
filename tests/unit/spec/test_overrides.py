from __future__ import annotations

import pytest

from benchbox.errors import ConfigurationError
from benchbox.spec import parse_overrides
from tests.support.good_matrix import GOOD


def test_an_override_replaces_a_value(load):
    matrix = load(GOOD, {"size": "full", "measure.steps": "3", "optim": "{lr: 0.5}"})
    assert matrix.scalars["size"] == "full"
    assert (matrix.measure.steps, matrix.optim.lr) == (3, 0.5)
    assert matrix.values["size"] == "full", "a run keeps what it was really told"


def test_an_override_replaces_an_axis_and_null_takes_one_out(load):
    assert len(list(load(GOOD, {"axes.batch": "[1, 2, 4]"}).cells())) == 6
    assert len(list(load(GOOD, {"axes.batch": "null", "batch": "2"}).cells())) == 2


def test_null_takes_out_what_is_not_there_without_a_trace(load):
    """A spike guard without options is one with its defaults."""
    assert load(GOOD, {"optim.spike.max": "null"}).values == load(GOOD).values
    assert load(GOOD, {"optim": "{lr: 0.5}", "optim.spike.max": "null"}).optim.spike is None


def test_options_split_at_commas_outside_brackets_and_quotes():
    assert parse_overrides(["size=full, axes.batch=[1,2]", "data={lerobot: 'a,b'},size=tiny"]) == {
        "size": "tiny",
        "axes.batch": "[1,2]",
        "data": "{lerobot: 'a,b'}",
    }


@pytest.mark.parametrize("text", ["size", "=3", "measure.=3", "size=full,,seed=1", ""])
def test_what_is_not_key_value_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"--set .*: is not key=value; write it as --set measure.steps=3"):
        parse_overrides([text])


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("siez", "full", "--set siez=full: unknown key 'siez'; did you mean 'size'?"),
        ("measur.steps", "3", "--set measur.steps=3: unknown key 'measur'; did you mean 'measure'?"),
        ("axes.batch", "[1,x]", '--set axes.batch=[1,x]: axes.batch[1] must be a whole number, not "x"'),
        ("axes.batch", "[1", "--set axes.batch=[1: not YAML: expected ',' or ']', but got '<stream end>'"),
        ("size.x", "1", "--set size.x=1: size is not a mapping here; set size as a whole"),
        ("reference", "{cams: 3}", "--set reference={cams: 3}: no cell has cams=3; cams is one of 1"),
        (
            "batch",
            "3",
            "--set batch=3: batch is an axis, at m.yaml:7:3; set axes.batch=[...], or choose with --only batch=...",
        ),
    ],
)
def test_what_an_override_makes_wrong_points_to_the_option(refused, key, value, line):
    assert refused(GOOD, {key: value}) == [line]
