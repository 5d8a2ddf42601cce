"""Owners of the parts of a checkpoint."""

from __future__ import annotations

from benchbox.trainer.checkpoint.owners import PartOwners, assign_owners


def part(name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return name, (0,), (1,)


def test_every_part_has_one_owner_who_holds_it_and_ranks_own_about_as_many_bytes() -> None:
    """Each of two groups of two replicas holds a half of what is sharded; rank 3 has much of its own."""
    halves = [{part(f"{half}{number}"): 100 for number in range(10)} for half in "ab"]
    held = [halves[0], halves[0], halves[1], halves[1] | {part(f"own{number}"): 90 for number in range(8)}]
    owned = assign_owners(held)
    assert all(parts <= holder.keys() for parts, holder in zip(owned, held, strict=True))
    assert sorted(name for parts in owned for name in parts) == sorted({name for parts in held for name in parts})
    assert [sum(holder[name] for name in parts) for parts, holder in zip(owned, held, strict=True)] == [500, 500, 900, 820]


def test_a_single_process_owns_all_that_it_holds() -> None:
    assert PartOwners().owned({}, None) == {}
