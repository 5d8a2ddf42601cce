"""The part of a plan that this machine can run."""

from benchbox.launch.capacity import capacity_refusal
from benchbox.plan import Plan, Skip


def skip_beyond_capacity(planned: Plan, nnodes: int = 1) -> Plan:
    """Return a plan for machines like this one, in which cells of too many ranks on a node are skipped."""
    refusals = {cell: capacity_refusal(cell.world_size // nnodes) for cell in planned.cells}
    refused = tuple(Skip(cell, refusal) for cell, refusal in refusals.items() if refusal is not None)
    cells = tuple(cell for cell, refusal in refusals.items() if refusal is None)
    return Plan(cells, (*planned.skipped, *refused), tuple(cell for cell in planned.walks if refusals[cell] is None))
