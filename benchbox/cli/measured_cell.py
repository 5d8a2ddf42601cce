"""The measured cell that `--cell ID` names, and the policies of a run."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchbox.spec.measured_setup import MeasuredSetup


def find_measured_cell(run: Path, prefix: str) -> "MeasuredSetup":
    """Return the cell of a run whose id begins with `prefix`, as it was measured.

    Raises:
        ConfigurationError: there is no such cell, there are several, or no launch of it ended ok.
        RecordError: the run cannot be read.
    """
    from benchbox.spec.cell import Cell
    from benchbox.spec.measured_setup import MeasuredSetup
    from benchbox.store.run import RunStore

    store = RunStore(run)
    cells = store.run().cells
    matching = [cell_id for cell_id in cells if cell_id.startswith(prefix)]
    option = f"--cell {prefix}"
    if not matching:
        raise ConfigurationError(Problem(option, f"{run} has no such cell", did_you_mean(prefix, cells)))
    if len(matching) > 1:
        raise ConfigurationError(
            Problem(option, f"{len(matching)} cells of {run} begin so: {', '.join(matching)}", "add digits")
        )
    (cell_id,) = matching
    records = [record for record in store.records() if record["cell_id"] == cell_id]
    measured = [record for record in records if record["status"] == "ok"]
    if not measured:
        statuses = ", ".join(dict.fromkeys(record["status"] for record in records)) or "not run"
        message = f"no launch of cell {cell_id} in {run} ended ok ({statuses})"
        raise ConfigurationError(Problem(option, message, "choose a cell that was measured"))
    return MeasuredSetup(cell=Cell.from_dict(dict(measured[0]["config"])), label=f"cell {cell_id} of {run}")


def check_policies(run: Path, names: "Iterable[str]", policy_dirs: "Sequence[Path]") -> None:
    """Raise ConfigurationError for a policy of a run that is not found: a run knows names, and a matrix may name a path."""
    from benchbox.registry.policies import policy_entry

    for name in dict.fromkeys(names):
        try:
            policy_entry(name, policy_dirs)
        except ConfigurationError as error:
            hint = "name its folder by --policy-dir"
            raise ConfigurationError(Problem(str(run), error.problems[0].message, hint)) from None
