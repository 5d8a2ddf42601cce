"""The part of a plan that this machine can run."""

from pathlib import Path

from benchbox.errors import ConfigurationError, Problem
from benchbox.launch.capacity import capacity_refusal
from benchbox.plan import Plan, Skip


def skip_beyond_capacity(planned: Plan, nnodes: int = 1) -> Plan:
    """Return a plan for machines like this one, in which cells of too many ranks on a node are skipped."""
    refusals = {cell: capacity_refusal(cell.world_size // nnodes) for cell in planned.cells}
    refused = tuple(Skip(cell, refusal) for cell, refusal in refusals.items() if refusal is not None)
    cells = tuple(cell for cell, refusal in refusals.items() if refusal is None)
    return Plan(cells, (*planned.skipped, *refused), tuple(cell for cell in planned.walks if refusals[cell] is None))


def check_any_cell(matrix: Path, planned: Plan) -> None:
    """Raise ConfigurationError with the reasons if a plan has no cell to run."""
    if problems := unrunnable_problems(matrix, planned):
        raise ConfigurationError(problems)


def unrunnable_problems(matrix: Path, planned: Plan) -> list[Problem]:
    """Return why no cell of a plan can run, as one problem; none if a cell can."""
    if planned.cells:
        return []
    reasons = "; ".join(dict.fromkeys(skip.reason for skip in planned.skipped))
    return [Problem(str(matrix), f"no cell can run: {reasons}")]


def check_capacity(where: str, ranks: int) -> None:
    """Raise ConfigurationError if this machine cannot run a group of so many ranks.

    Args:
        where: the option or run that asks for them.
    """
    if refusal := capacity_refusal(ranks):
        raise ConfigurationError(Problem(where, refusal))
