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


def test_a_parameter_stays_whole_while_any_module_that_uses_it_is_being_called():
    """Layer b is called within a, and reads its weight."""
    kinds = [("call", ""), ("call", "a"), ("call", "b"), ("return", "b"), ("return", "a"), ("return", "")]
    timeline = Timeline(events=tuple(Event(kind, name=name) for kind, name in kinds), earlier=(), external={"b": (A,)})
    (first,) = fetch_parameters(STRUCTURE, timeline, 1)
    assert [fetch.gathered for fetch in first.fetches[:3]] == [(ROOT,), (A, NORM), (B,)]
    assert [fetch.released for fetch in first.fetches[3:]] == [(B,), (A, NORM), (ROOT,)]


def test_what_was_prefetched_and_not_used_is_released_before_the_next_micro_step():
    """A step may end early, without leaving the order: here after the first call of the second."""
    begun = uses("ab")[:2]
    timeline = Timeline(events=uses("ab"), earlier=(uses("ab"), uses("ab"), begun))
    _, ended = fetch_parameters(STRUCTURE, timeline, 2)
    assert ended.before == {NORM, ROOT, A}, "b was prefetched at the call of a"
    assert gathers(ended) == [(0, (B,))]


def test_what_stays_whole_stays_so_in_a_module_that_does_not_return_in_backward():
    structure = replace(STRUCTURE, layout={**STRUCTURE.layout, "": (ROOT, NORM), "a": (A,)})
    (recording,) = fetch_parameters(structure, Timeline(events=uses("ab"), earlier=()), 1)
    (following,) = fetch_parameters(structure, Timeline(events=uses("ab")), 1)
    assert recording.after == following.after == {NORM}


def test_what_is_prefetched_is_a_tenth_of_the_policy_at_least_and_of_the_bucket_at_most():
    """DeepSpeed wants buckets with an even number of elements."""
    sizes = {38: 3, 39: 4, 6 * 10**9: 50_000_000}
    for numel, limit in sizes.items():
        parameters = (ParameterShape(name="p", shape=(numel,), trains=True, group=0),)
        assert zero3.prefetch_limit(Structure(parameters=parameters)) == limit
    parts = {"a": 349, "b": 1, "c": 1000, "d": 2150}
    structure = Structure(
        parameters=tuple(ParameterShape(name=name, shape=(n,), trains=True, group=0) for name, n in parts.items()),
        layout={"": (), **{name: (number,) for number, name in enumerate(parts)}},
    )
    (step,) = fetch_parameters(structure, Timeline(events=uses("abcd")), 1)
    assert zero3.is_persistent(structure.parameters[1], structure)
    assert [fetch.prefetched for fetch in step.fetches[:2]] == [(0, 2), (3,)], "349 are less than 350"


def test_small_parameters_stay_whole_up_to_a_thousandth_of_the_policy_and_a_hundred_thousand_elements():
    for total, largest in ((50_000, 50), (10**9, 100_000)):
        sizes = (largest, largest + 1, total - 2 * largest - 1)
        structure = Structure(parameters=tuple(ParameterShape(name=str(n), shape=(n,), trains=True, group=0) for n in sizes))
        assert [zero3.is_persistent(parameter, structure) for parameter in structure.parameters] == [True, False, False]


def test_a_parameter_stays_until_backward_if_fewer_elements_are_used_in_between_than_the_limit(monkeypatch):
    """Between the uses of layer a are two of b and one of the root, of 2500 elements."""
    assert zero3._MAX_LIVE_NUMEL == 10**9
    for limit, released in ((2500, (A,)), (2501, ())):
        monkeypatch.setattr(zero3, "_MAX_LIVE_NUMEL", limit)
        assert fetched("ab", "ab")[0].fetches[2].released == released


def test_what_was_released_makes_room_for_prefetches(monkeypatch):
    """With room for 2000 elements the root, a layer and the prefetch of one more may be whole; going back, b follows c."""
    monkeypatch.setattr(zero3, "_MAX_LIVE_NUMEL", 2000)
    (step,) = fetched("abc", "abc")
    assert gathers(step)[:5] == [(0, (ROOT,)), (0, (A,)), (1, (B,)), (3, (C,)), (5, (B,))]
    assert [(use, fetch.released) for use, fetch in enumerate(step.fetches[:7]) if fetch.released] == [(2, (A,)), (4, (B,))]
    assert gathers(step)[5:] == [(11, (A,))]


def test_a_large_policy_releases_what_is_not_used_soon(monkeypatch):
    """Beyond the elements that may be between two uses layer a is gathered again for backward."""
    monkeypatch.setattr(zero3, "_MAX_LIVE_NUMEL", 1500)
    (step,) = fetched("ab", "ab")
    assert [(use, fetch.released) for use, fetch in enumerate(step.fetches) if fetch.released] == [
        (2, (A,)),
        (8, (B,)),
        (10, (A,)),
    ]
    assert gathers(step) == [(0, (ROOT,)), (0, (A,)), (3, (B,)), (9, (A,))], "and b is not prefetched: that would be too much"


def predicted(*micro_steps, after=None, accumulation=1):
    """Return the prediction for three ranks; with `after`, of a step whose peak follows this event of its last micro-step."""
    *earlier, events = map(uses, micro_steps)
    if after is not None:
        number = 1 + events.index(after)
        events = (*events[:number], Event("allocate", 10**6), Event("free", 10**6), *events[number:])
    timeline = Timeline(events=events, earlier=tuple(earlier))
    return predict(STRUCTURE, timeline, CellSetup(backend="zero3", world_size=3, masters=False, accumulation=accumulation))


# Of three ranks: partitions of 167, 334 (three times) and 1 elements.
PARTITIONS = 167 + 3 * 334 + 1


def test_a_rank_stores_partitions_of_everything_and_a_whole_bucket():
    """Two bytes for parameters and gradients, four for masters and each of two moments."""
    estimate = predicted("ab", "ab", after=Event("call", name="a"))
    stored = {"parameters": 2, "gradients": 2, "masters": 4, "moments": 8}
    assert {name: estimate.components[name] for name in stored} == {name: size * PARTITIONS for name, size in stored.items()}
    assert estimate.components["reduction"] == 2 * 3504
    assert estimate.resident_bytes == (2 + 4 + 8) * PARTITIONS


def test_several_parameters_are_copied_from_one_buffer_which_stays_until_the_last_is_used(monkeypatch):
    """A prefetch of two layers: when a is called both are copied, and the buffer, with its padding, waits for the call of b."""
    monkeypatch.setattr(zero3, "_PREFETCH_SHARE", 2)
    whole = 2 * (501 + 1000 + 1000) + 2 * 3  # the root and the norm in buffers of their own
    at_root, at_a, at_b = (
        predicted("ab", "ab", after=Event("call", name=name)).components["all_gather"] for name in ("", "a", "b")
    )
    assert at_root == 2 * 501 + 2 * 3 + 2 * 2 * 1002
    assert at_a == whole + 2 * 2 * 1002
    assert at_b == whole


def test_what_was_prefetched_in_vain_takes_no_memory_any_more(monkeypatch):
    """Layers a and b, in one buffer, when the order is left at c."""
    monkeypatch.setattr(zero3, "_PREFETCH_SHARE", 2)
    assert predicted("ab", "ab", "c", after=Event("call", name="c")).components["all_gather"] == 2 * (501 + 3 + 1002)


def test_what_is_released_takes_no_memory_any_more():
    """In a step that records an order, of which only the root is being called between its layers."""
    assert predicted("ab", after=Event("return", name="a")).components["all_gather"] == 2 * 501
    assert predicted("ab", after=Event("call", name="a")).components["all_gather"] == 2 * (501 + 1000 + 3)


def test_a_micro_step_begins_with_what_the_one_before_left():
    one, two = (predicted(*["ab"] * 4, after=Event("return", name=""), accumulation=n) for n in (1, 2))
    assert one.components["all_gather"] == two.components["all_gather"] == 2 * (501 + 2 * 1002) + 2 * 3


def test_gradients_are_scattered_from_the_bucket_and_one_exists_before_it_is_moved_there():
    gradient = 2 * 1000
    timeline = Timeline(events=(*uses("ab"), Event("allocate", 10**6), Event("gradient", A), Event("free", 10**6)))
    setup = CellSetup(backend="zero3", world_size=3, masters=False)
    estimate, without = (
        predict(STRUCTURE, replace(timeline, events=events), setup) for events in (timeline.events, uses("ab"))
    )
    assert estimate.components["gradients"] == 2 * PARTITIONS + gradient
    assert without.moment == "end of backward"
    assert without.components["reduction"] == 2 * 3504 + 2 * 3504 + 2 * 3504  # the bucket, what is scattered, and gloo's copy


def test_the_optimizer_casts_the_gradients_of_a_group(monkeypatch):
    """Beside a small bucket and few parameters that are whole that is the peak, when nothing is but what stays so."""
    monkeypatch.setattr("benchbox.theory.communication.DEEPSPEED_BUCKET", 100)
    estimate = predicted("b", "b")
    assert estimate.moment == "optimizer"
    assert estimate.components["workspace"] == 4 * PARTITIONS
    assert estimate.components["all_gather"] == 2 * 3


@pytest.mark.parametrize(("micro_steps", "count"), [(["ab"], 6 + 1), (["ab", "ab"], 3 + 1)])
def test_every_step_ends_with_an_all_gather_of_what_stays_whole(micro_steps, count):
    assert predicted(*micro_steps).collectives["all_gather"]["count"] == count
