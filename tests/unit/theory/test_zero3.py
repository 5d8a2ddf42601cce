"""Fetches of ZeRO-3 in a policy of three layers, worked out by hand. `tests/integration/test_zero3_order.py` has real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchbox.theory import zero3
from benchbox.theory.prediction import predict
from benchbox.theory.structure import CellSetup, Event, ParameterShape, Structure, Timeline
from benchbox.theory.zero3 import Fetch, fetch_parameters

ROOT, A, B, C, NORM = range(5)
NUMELS = (500, 1000, 1000, 1000, 3)
# At once 350 elements are prefetched, so one parameter. The norm of layer a, of at most a thousandth of all, stays whole.
STRUCTURE = Structure(
    parameters=tuple(
        ParameterShape(name=name, shape=(n,), trains=True, group=0) for name, n in zip("rabcn", NUMELS, strict=True)
    ),
    layout={"": (ROOT,), "a": (A, NORM), "b": (B,), "c": (C,)},
)


def uses(layers: str) -> tuple[Event, ...]:
    """Return what a policy does that calls these layers one after another, and goes back over them."""
    kinds = [("call", ""), *((kind, name) for name in layers for kind in ("call", "return")), ("return", "")]
    kinds += [("call_backward", ""), *((f"{kind}_backward", name) for name in layers[::-1] for kind in ("call", "return"))]
    return tuple(Event(kind, name=name) for kind, name in kinds)


def fetched(*micro_steps: str, accumulation: int = 1, **changes):
    """Return the last step of a training whose micro-steps call these layers."""
    *earlier, last = map(uses, micro_steps)
    timeline = Timeline(events=last, earlier=tuple(earlier), **changes)
    return fetch_parameters(STRUCTURE, timeline, accumulation)


def gathers(micro_step):
    """Return (number of the use, parameters) of every all-gather."""
    return [(use, numbers) for use, fetch in enumerate(micro_step.fetches) for numbers in fetch.gathers]


# In a step over layers a, b: uses 0 to 5 are forward (root, a, return, b, return, return), 6 to 10 backward.
def test_the_first_micro_step_gathers_every_module_in_forward_and_again_in_backward():
    """It records the order of modules, before which the ranks compare an empty one. Nothing is whole, or stays so."""
    (first,) = fetched("ab")
    assert gathers(first) == [(0, (ROOT,)), (1, (A, NORM)), (3, (B,)), (6, (ROOT,)), (7, (B,)), (9, (A, NORM))]
    assert [fetch.released for fetch in first.fetches if fetch.released] == [(A, NORM), (B,), (ROOT,), (B,), (A, NORM)]
    assert first.broadcasts == (8, 0)
    assert first.before == frozenset()
    assert first.after == frozenset()


def test_in_a_recorded_order_the_next_parameters_are_prefetched_and_stay_until_backward_has_used_them():
    """The recorded order has 6 modules, which use 8 parameters. What is small stays whole from the end of a step on."""
    (second,) = fetched("ab", "ab")
    assert gathers(second) == [(0, (ROOT,)), (0, (A,)), (1, (B,))]
    assert second.fetches[1] == Fetch(awaited=(A,), prefetched=(B,))
    assert [(use, fetch.released) for use, fetch in enumerate(second.fetches) if fetch.released] == [(8, (B,)), (10, (A,))]
    assert second.broadcasts == (8, 6 * 8, 8, 8 * 8, 8, 8 * 8)
    assert second.before == second.after == {NORM}
    assert fetched("ab", "ab", "ab") == [replace(second, broadcasts=())]


def test_a_step_that_leaves_the_order_gathers_module_by_module_from_there_on():
    """Layer b was prefetched and is not used next: it is released, and gathered again when c has been."""
    (third,) = fetched("ab", "ab", "acb")
    assert gathers(third)[:5] == [(0, (ROOT,)), (0, (A,)), (1, (B,)), (3, (C,)), (5, (B,))]
    assert third.fetches[3] == Fetch(released=(B,), gathered=(C,), awaited=(C,))
    assert gathers(third)[5:] == [(8, (ROOT,)), (9, (B,)), (11, (C,))], "a is whole since before the order was left"
    assert third.broadcasts == ()


def test_a_longer_step_leaves_the_order_at_its_end():
    """A policy that calls the same modules and then one more."""
    shorter, longer = uses("ab"), (*uses("ab"), Event("call", name="c"))
    (micro_step,) = fetch_parameters(STRUCTURE, Timeline(events=longer, earlier=(shorter, shorter)), 1)
    assert gathers(micro_step)[-1] == (len(shorter), (C,))
    assert len(gathers(micro_step)) == 4


def test_the_step_after_one_that_left_the_order_records_a_new_one():
    (recording,), (following,) = fetched("ab", "ab", "cb", "cb"), fetched("ab", "ab", "cb", "cb", "cb")
    assert gathers(recording) == [(0, (ROOT,)), (1, (C,)), (3, (B,)), (6, (ROOT,)), (7, (B,)), (9, (C,))]
    assert recording.broadcasts == (8, 0)
    assert gathers(following) == [(0, (ROOT,)), (0, (C,)), (1, (B,))]


def test_what_a_position_releases_is_decided_once():
    """DeepSpeed caches it: where b was kept because the old order used it again, it is kept in the new one as well."""
    (new,), (changed,) = fetched("cab", "cab"), fetched("abb", "abb", "cab", "cab", "cab")
    assert gathers(new) == gathers(changed)
    assert B not in new.after
    assert B in changed.after


def test_micro_steps_of_one_step_follow_the_order_of_the_one_before():
    first, second = fetched("ab", "ab", "ab", "ab", accumulation=2)
    assert gathers(first) == gathers(second) == [(0, (ROOT,)), (0, (A,)), (1, (B,))]
    assert first.broadcasts == second.broadcasts == ()


def test_what_stays_whole_is_gathered_at_the_end_of_a_step_and_not_of_a_micro_step():
    recording, following = fetched("ab", "ab", accumulation=2)
    assert NORM not in recording.after | following.before
    assert gathers(following) == [(0, (ROOT,)), (0, (A,)), (1, (NORM,)), (1, (B,))]


def test_without_earlier_micro_steps_a_step_follows_others_like_it():
    timeline = Timeline(events=uses("ab"))
    for accumulation in (1, 3):
        known = fetched(*["ab"] * 4 * accumulation, accumulation=accumulation)
        assert fetch_parameters(STRUCTURE, timeline, accumulation) == known


def test_a_parameter_that_another_module_reads_is_gathered_with_that_module():
    (first,) = fetched("ab", external={"a": (C,)})
    assert gathers(first)[1] == (1, (A, C, NORM))


def test_a_large_policy_releases_what_is_not_used_soon(monkeypatch):
    """Beyond the elements that may be between two uses, 10^9 by default: here layer a is gathered again for backward."""
    monkeypatch.setattr(zero3, "_MAX_LIVE_NUMEL", 1500)
    (step,) = fetched("ab", "ab")
    assert [(use, fetch.released) for use, fetch in enumerate(step.fetches) if fetch.released] == [
        (2, (A,)),
        (8, (B,)),
        (10, (A,)),
    ]
    assert gathers(step) == [(0, (ROOT,)), (0, (A,)), (3, (B,)), (9, (A,))], "and b is not prefetched: that would be too much"


def predicted(*micro_steps, events=None):
    *earlier, last = map(uses, micro_steps)
    timeline = Timeline(events=events or last, earlier=tuple(earlier))
    return predict(STRUCTURE, timeline, CellSetup(backend="zero3", world_size=4, masters=False))


def test_several_parameters_are_copied_from_one_buffer_which_stays_until_the_last_is_used(monkeypatch):
    """A prefetch of two layers, 4000 bytes: when a is called both are copied, and the buffer waits for the call of b."""
    monkeypatch.setattr(zero3, "_PREFETCH_SHARE", 2)
    events = uses("ab")
    called = 1 + events.index(Event("call", name="a"))
    at_call = (*events[:called], Event("allocate", 10**6), Event("free", 10**6), *events[called:])
    later = 1 + events.index(Event("call", name="b"))
    at_next = (*events[:later], Event("allocate", 10**6), Event("free", 10**6), *events[later:])
    whole = 2 * (500 + 1000 + 1000) + 2 * 4  # and the norm, in partitions of one element
    assert predicted("ab", "ab", events=at_call).components["all_gather"] == whole + 4000
    assert predicted("ab", "ab", events=at_next).components["all_gather"] == whole


def test_a_parameter_that_is_gathered_alone_stays_in_its_buffer():
    events = uses("ab")
    called = 1 + events.index(Event("call", name=""))
    at_call = (*events[:called], Event("allocate", 10**6), Event("free", 10**6), *events[called:])
    assert predicted("ab", events=at_call).components["all_gather"] == 2 * 500


@pytest.mark.parametrize(("micro_steps", "count"), [(["ab"], 6 + 1), (["ab", "ab"], 3 + 1)])
def test_every_step_ends_with_an_all_gather_of_what_stays_whole(micro_steps, count):
    assert predicted(*micro_steps).collectives["all_gather"]["count"] == count
