"""Output of `benchbox estimate` for a matrix: values for JSON, or a few lines of text, for each cell."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer

from benchbox.analysis.quantities import quantity
from benchbox.analysis.summary import label, varying_fields
from benchbox.errors import UnsupportedError
from benchbox.registry.recipes import recipe_by_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.cli.predicting import Predictions
    from benchbox.launch.simulated_ranks import Simulation
    from benchbox.plan import Plan
    from benchbox.spec.cell import Cell
    from benchbox.theory.links import Device, Link, MeasuredLink
    from benchbox.theory.prediction import Estimate

    Hardware = tuple[Device, Link | MeasuredLink | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimates:
    """Estimates of the cells of a plan, by cell id. A text is a reason why something is not known.

    `largest` are the largest batches of the walks, within `limit_bytes` of memory. `simulations` is empty if there are none.
    """

    planned: Plan
    predictions: Predictions
    largest: Mapping[str, int | str]
    limit_bytes: int | None
    simulations: Mapping[str, Simulation | str]
    hardware: Hardware | None
    measured: MeasuredLink | None

    def to_json(self) -> list[dict[str, Any]]:
        """Return a mapping for each cell, the skipped ones last."""
        skipped = [
            {"cell_id": skip.cell.cell_id, "cell": skip.cell.to_dict(), "prediction": None, "reason": f"skipped: {skip.reason}"}
            for skip in self.planned.skipped
        ]
        return [*(self._as_json(cell) for cell in self.planned.cells), *skipped]

    def _as_json(self, cell: Cell) -> dict[str, Any]:
        values: dict[str, Any] = {"cell_id": cell.cell_id, "cell": cell.to_dict()}
        entry = self.predictions[cell.cell_id]
        if isinstance(entry, str):
            values |= {"prediction": None, "reason": entry}
        else:
            values["prediction"] = entry.to_dict()
            if self.hardware is not None:
                bounds = _step_time_s(cell, entry, *self.hardware)
                is_known = not isinstance(bounds, str)
                values["step_time_s"] = dict(zip(("lower", "upper"), bounds, strict=True)) if is_known else {"reason": bounds}
            if self.measured is not None:
                values["communication_time_s"] = {
                    "link": self.measured.name,
                    "upper": entry.communication_time_s(self.measured),
                }
        if cell.cell_id in self.largest:
            largest = self.largest[cell.cell_id]
            values["largest_batch"] = {"reason": largest} if isinstance(largest, str) else {"batch": largest}
        if cell.cell_id in self.simulations:
            simulation = self.simulations[cell.cell_id]
            values["simulation"] = {"reason": simulation} if isinstance(simulation, str) else asdict(simulation)
        return values

    def print_text(self) -> None:
        """Print a line for each cell, and below it what is predicted, or why it is skipped."""
        cells, skipped = self.planned.cells, self.planned.skipped
        fields = varying_fields(cell.to_dict() for cell in (*cells, *(skip.cell for skip in skipped)))
        for cell in cells:
            typer.secho(f"{cell.cell_id}  {self._label(cell, fields)}", bold=True)
            for line in self._lines(cell):
                print(f"  {line}")
        for skip in skipped:
            typer.secho(f"{skip.cell.cell_id}  {label(skip.cell.to_dict(), fields)}", bold=True)
            print(f"  skipped: {skip.reason}")
        device, link = self.hardware or (None, self.measured)
        has_links = any(cell.world_size > 1 for cell in cells)
        sources = [entry for entry in (device, link if has_links else None) if entry is not None]
        if sources:
            print("\n" + "\n".join(f"{entry.name}: {entry.source}" for entry in sources))

    def _label(self, cell: Cell, fields: Sequence[str]) -> str:
        if cell.cell_id not in self.largest:
            return label(cell.to_dict(), fields)
        others = [field for field in fields if field != "batch"] or ["backend"]
        return f"{label(cell.to_dict(), [*others, 'batch'])} and up"

    def _lines(self, cell: Cell) -> Iterator[str]:
        entry = self.predictions[cell.cell_id]
        if isinstance(entry, str):
            yield f"no prediction: {entry}"
            return
        components = ", ".join(f"{name} {quantity(size, 'bytes')}" for name, size in entry.components.items())
        at_batch = f" at batch {cell.batch}" if cell.cell_id in self.largest else ""
        yield f"peak {quantity(entry.peak_bytes, 'bytes', 4)}{at_batch} in {entry.moment}: {components}"
        if cell.cell_id in self.largest:
            yield self._describe_largest(self.largest[cell.cell_id])
        collectives = [
            f"{name} {traffic['count']} x, {quantity(traffic['bytes'], 'bytes')}" for name, traffic in entry.collectives.items()
        ]
        yield f"communication of a step: {'; '.join(collectives) or 'none'}"
        if cell.cell_id in self.simulations:
            yield _describe_simulation(self.simulations[cell.cell_id], entry)
        if self.measured is not None and entry.world_size > 1:
            seconds = quantity(entry.communication_time_s(self.measured), "s")
            yield f"communication on the {self.measured.name} link: {seconds}, if none of it overlaps with computation"
        if self.hardware is not None:
            bounds = _step_time_s(cell, entry, *self.hardware)
            lower, upper = ("", "") if isinstance(bounds, str) else (quantity(seconds, "s") for seconds in bounds)
            if isinstance(bounds, str):
                yield f"step: not bounded, because {bounds}"
            elif entry.world_size > 1:
                yield f"step: {lower} to {upper}, as communication overlaps wholly or not at all"
            else:
                yield f"step: {lower}, as one rank does not communicate"
        yield from entry.notes

    def _describe_largest(self, largest: int | str) -> str:
        if isinstance(largest, str):
            return f"largest batch not predicted: {largest}"
        limit = quantity(self.limit_bytes, "bytes")
        return (
            f"largest batch predicted to fit in {limit}: {largest}"
            if largest
            else f"not even batch 1 is predicted to fit in {limit}"
        )


def _step_time_s(cell: Cell, entry: Estimate, device: Device, link: Link | MeasuredLink | None) -> tuple[float, float] | str:
    """Return the bounds of a step's time with products in the dtype of the recipe, or why they are not known."""
    try:
        return entry.step_time_s(device.computing_in(recipe_by_name(cell.recipe).compute), link)
    except UnsupportedError as error:
        return str(error)


def _describe_simulation(simulation: Simulation | str, entry: Estimate) -> str:
    """Return whether a simulation confirms the formulas, as text."""
    if isinstance(simulation, str):
        return f"not simulated: {simulation}"
    differences = simulation.differences(entry)
    verdict = (
        "differs: " + "; ".join(differences) if differences else "equals the formulas in every collective and parameter byte"
    )
    return f"simulated as rank 0 of {entry.world_size} on {simulation.tensors} tensors: {verdict}"
