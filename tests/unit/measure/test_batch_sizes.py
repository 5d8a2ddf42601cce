"""Sizes of the micro-batches that steps got."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from benchbox.data.loading.trimming import MULTIPLE, trim
from benchbox.measure.batch_sizes import SizedBatches
from tests.support.policy_batches import POLICIES, build_on_meta, make_batch

if TYPE_CHECKING:
    from benchbox.registry.contracts import BatchSpec


@pytest.mark.parametrize("name", POLICIES)
def test_whole_batches_have_the_sizes_of_the_spec_in_every_part(name: str) -> None:
    spec = build_on_meta(name, "tiny", cams=3).batch_spec()
    whole = make_batch(spec, 2)
    batches = SizedBatches([make_batch(spec, 1), whole], spec)
    assert len(list(batches)) == 2
    sizes, reason = batches.result()
    assert reason is None
    assert sizes == {part: {"smallest": size, "largest": size, "spec": size} for part, size in spec.part_sizes.items()}
    assert sizes["cameras"]["spec"] == 3
    texts = {name.removesuffix("_tokens") for name in whole if name.endswith("_tokens")}
    assert {"cameras", *texts}.intersection(spec.trimmable) <= sizes.keys(), "a part that may be cut is not seen"


def test_the_smallest_and_the_largest_size_of_each_part_are_kept_apart() -> None:
    """The batch with the most cameras is the one with the shortest prompt."""
    spec = build_on_meta("pi05", "tiny", cams=4).batch_spec()
    assert spec.prompt_tokens > 2 * MULTIPLE
    batches = [make_batch(spec, 2) for _ in range(2)]
    for batch, cameras, end in zip(batches, (1, 3), (2 * MULTIPLE, 5), strict=True):
        batch["image_mask"][..., cameras:] = False
        batch["prompt_mask"][:, :end], batch["prompt_mask"][:, end:] = True, False
    given = [trim([batch], spec.trimmable)[0] for batch in batches]
    sized = SizedBatches(given, spec)
    assert all(got is batch for got, batch in zip(sized, given, strict=True)), "a step gets another batch"
    sizes, _ = sized.result()
    assert sizes is not None
    assert sizes["cameras"] == {"smallest": 1, "largest": 3, "spec": 4}
    assert sizes["prompt"] == {"smallest": MULTIPLE, "largest": 2 * MULTIPLE, "spec": spec.prompt_tokens}


def test_unknown_sizes_have_a_reason() -> None:
    spec = build_on_meta("pi05", "tiny", cams=1).batch_spec()
    empty: BatchSpec = replace(spec, cameras=0, prompt_tokens=0, response_tokens=0, fast_tokens=0, trimmable=())
    for given, reason in (
        (None, "the policy generates its batches, and no spec says how large they are"),
        (empty, "the spec of the policy asks for no cameras and no texts"),
    ):
        batches = SizedBatches([make_batch(spec, 1)], given)
        next(batches)
        assert batches.result() == (None, reason)
    assert SizedBatches([], spec).result() == (None, "no step was measured")
