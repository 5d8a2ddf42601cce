"""The set-up of a measured cell, as the beginning of a training file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from benchbox.errors import Problem
from benchbox.spec.cell import OptimSpec
from benchbox.spec.fields import POINT_TYPES
from benchbox.spec.matrix import to_yaml_word
from benchbox.spec.optim import SpikeSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.spec.cell import Cell
    from benchbox.spec.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSetup:
    """A cell that a run has measured. `label` names it in messages: `cell 3f2a... of runs/backends`."""

    cell: Cell
    label: str


def add_measured_values(source: Source, measured: MeasuredSetup) -> list[Problem]:
    """Add the fields of a measured cell to a training file that does not set them.

    The file may set `data`, then as a whole, and keys of `optim`, which no measurement decides. Any other field must be as
    measured: what differs is returned as problems. Data that the file does not set are left to the caller.
    """
    problems = []
    for name in POINT_TYPES:
        value = getattr(measured.cell, name)
        if name not in source.values:
            if value is not None:
                _set(source, name, value)
        elif source.values[name] != value:
            message = f"{name} is {to_yaml_word(source.values[name])} here and {to_yaml_word(value)} in {measured.label}"
            hint = f"remove it, or change the measured set-up on purpose with --set {name}=..."
            problems.append(Problem(source.where((name,)), message, hint))
    optim = source.values.get("optim", {})
    if isinstance(optim, dict):
        _set(source, "optim", _changed_values(measured.cell.optim) | optim)
    return problems


def incomplete_data(source: Source, overrides: Mapping[str, str], measured: MeasuredSetup) -> list[Problem]:
    """Return problems of overrides that change a part of the measured data: they would be parts of the default dataset."""
    if "data" in source.values or {"data", "data.lerobot", "data.mixture"} & overrides.keys():
        return []
    message = f"the data of {measured.label} are taken as a whole, and this is a part of them"
    return [
        Problem(f"--set {key}", message, "give a file with `data`, or --set data.lerobot=PATH beside it")
        for key in overrides
        if key.startswith("data.")
    ]


def differences(cell: Cell, measured: Cell) -> list[str]:
    """Return a line for every field in which a cell differs from the measured one."""
    lines = []
    for before, after, prefix in (
        (measured, cell, ""),
        (measured.data, cell.data, "data."),
        (measured.optim, cell.optim, "optim."),
    ):
        for declared in fields(before):
            old, new = getattr(before, declared.name), getattr(after, declared.name)
            if old != new and declared.name not in ("data", "optim"):
                lines.append(f"{prefix}{declared.name} is {new}, measured with {old}")
    return lines


def _changed_values(optim: OptimSpec) -> dict[str, Any]:
    """Return the values that are not the default, as in a file."""
    defaults, values = OptimSpec().to_dict(), optim.to_dict()
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    if optim.groups:
        changed["groups"] = [{key: value for key, value in group.items() if value is not None} for group in values["groups"]]
    if optim.spike is not None:
        spike = asdict(SpikeSpec())
        changed["spike"] = {key: value for key, value in asdict(optim.spike).items() if value != spike[key]}
    return changed


def _set(source: Source, name: str, value: Any) -> None:
    source.values[name] = value
    source.positions.setdefault((name,), source.positions[()])
