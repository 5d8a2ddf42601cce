"""Locations in the training's code where optimizers and schedules are built and weights are cast."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from benchbox.audit.judge import judge
from benchbox.observer.observer import StepObserver


class OwnAdamW(torch.optim.AdamW):
    def __init__(self, parameters):
        super().__init__(parameters, lr=1e-3)


class CastsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.to(torch.bfloat16)

    def forward(self, inputs):
        return self.layer(inputs)


def observed_locations(build, inputs_dtype=torch.bfloat16):
    """Train what `build` returns, a model, its optimizer and what else must stay alive, and return the facts' locations."""
    with StepObserver(source="command", steps=2) as observer:
        model, optimizer, *_others = build()
        for _ in range(2):
            model(torch.ones(2, 8, dtype=inputs_dtype)).float().sum().backward()
            optimizer.step()
    return observer.facts().locations


def line_of(text, function):
    """Return the line of this file in which a function has a text."""
    lines, first = inspect.getsourcelines(function)
    (index,) = [index for index, line in enumerate(lines) if text in line]
    return first + index


def build_cast_model():
    model = nn.Sequential(nn.Linear(8, 8))
    model.bfloat16()
    optimizer = OwnAdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    return model, optimizer, schedule


def test_each_location_is_the_line_that_called_and_its_stack_leads_on_to_the_callers():
    locations = {location.kind: location for location in observed_locations(build_cast_model)}
    assert {kind: location.name for kind, location in locations.items()} == {
        "optimizer": "OwnAdamW",
        "schedule": "LinearLR",
        "cast": "Sequential to bfloat16",
    }
    for kind, text in (("optimizer", "OwnAdamW("), ("schedule", "LinearLR("), ("cast", ".bfloat16()")):
        location = locations[kind]
        assert (Path(location.file), location.function) == (Path(__file__), "build_cast_model")
        assert location.line == line_of(text, build_cast_model)
        assert location.stack[0] == f"{__file__}:{location.line} in build_cast_model"
        assert location.stack[1].endswith(" in observed_locations")


def test_a_cast_in_a_constructor_is_found():
    def build():
        model = CastsItself()
        return model, OwnAdamW(model.parameters())

    (cast,) = [location for location in observed_locations(build) if location.kind == "cast"]
    assert (cast.function, cast.line) == ("__init__", line_of("self.to", CastsItself))


def test_a_cast_that_was_undone_is_no_location_and_neither_is_one_of_another_model():
    def build():
        nn.Linear(8, 8).half()
        other = nn.Linear(8, 8).half()
        model = nn.Sequential(nn.Linear(8, 8))
        model[0].to(torch.bfloat16)
        model.float()
        return model, OwnAdamW(model.parameters()), other

    assert {location.kind for location in observed_locations(build, torch.float32)} == {"optimizer"}


@pytest.fixture
def default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("default_dtype")
def test_without_a_cast_the_line_that_set_the_default_dtype_is_the_location():
    def build():
        torch.set_default_dtype(torch.bfloat16)
        model = nn.Linear(8, 8)
        torch.set_default_dtype(torch.float32)
        return model, OwnAdamW(model.parameters())

    (location,) = [location for location in observed_locations(build) if location.kind == "default dtype"]
    assert (location.name, location.line) == ("bfloat16", line_of("set_default_dtype(torch.bfloat16)", build))


def test_functions_are_restored_when_the_observer_is_done():
    before = (torch.optim.Optimizer.__init__, nn.Module.to, nn.Module.half, torch.set_default_dtype)
    with StepObserver(source="command", steps=1):
        assert nn.Module.to is not before[1]
    assert (torch.optim.Optimizer.__init__, nn.Module.to, nn.Module.half, torch.set_default_dtype) == before


def test_findings_have_the_locations_that_may_have_caused_them_nearest_first():
    with StepObserver(source="command", steps=3) as observer:
        model, optimizer, _ = build_cast_model()
        for _ in range(3):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
    findings = {finding.code: finding for finding in judge([observer.facts()]).findings}
    assert [location.kind for location in findings["BXP101"].locations] == ["cast", "optimizer"]
    assert findings["BXP101"].to_dict()["locations"][0]["function"] == "build_cast_model"
    assert "torch.autocast" in findings["BXP101"].repair


class Incomparable(torch.optim.AdamW):
    def __eq__(self, other):
        raise RuntimeError("optimizers are not compared")


class Secretive(nn.Linear):
    def parameters(self, recurse=True):
        raise RuntimeError("nobody lists these")


def test_no_object_of_the_training_can_make_the_recorder_fail_it():
    def build():
        model = nn.Linear(8, 8).bfloat16()
        return model, Incomparable(model.parameters()), Secretive(4, 4).half()

    assert {location.kind for location in observed_locations(build)} == {"cast", "optimizer"}


def test_casts_of_modules_that_are_gone_leave_room_for_later_ones():
    def build():
        for _ in range(200):
            nn.Linear(2, 2).half()
        model = nn.Linear(8, 8).bfloat16()
        return model, OwnAdamW(model.parameters())

    (cast,) = [location for location in observed_locations(build) if location.kind == "cast"]
    assert cast.name == "Linear to bfloat16"
