"""Number of ranks that this machine can run."""

from __future__ import annotations

from benchbox.launch.process.environment import usable_cores

# A rank needs a core to itself for times that mean something. A matrix for more ranks than cores can still be tried out, with
# a few ranks on each core; beyond that, ranks only wait for each other, and their memory ends the machine before they step.
RANKS_PER_CORE = 8


def capacity_refusal(ranks: int) -> str | None:
    """Return why this machine cannot run a group of so many ranks, or None. Ranks without a GPU of their own refuse later."""
    cores = usable_cores()
    if ranks <= RANKS_PER_CORE * cores:
        return None
    return (
        f"{ranks} ranks are more than {RANKS_PER_CORE * cores}, {RANKS_PER_CORE} for each of the {cores} usable cores of this "
        "machine: they would do little but wait for a core; lower world_size"
    )
