"""Records that share their equal values in memory."""

from __future__ import annotations

import json

import pytest

from benchbox.store.record import share_equal_values

EARLIER = {"zero": 0.0, "one": 1, "nested": {"values": [0.0, 1.0], "name": "ddp"}, "unknown": None}


def test_equal_values_are_shared_also_inside_of_nested_objects():
    shared = share_equal_values(json.loads(json.dumps(EARLIER)), EARLIER)
    assert shared["nested"] is EARLIER["nested"]
    changed = share_equal_values(json.loads(json.dumps(EARLIER | {"nested": {"values": [0.0, 1.0], "name": "fsdp2"}})), EARLIER)
    assert changed["nested"]["values"] is EARLIER["nested"]["values"]
    assert changed["nested"]["name"] == "fsdp2"


@pytest.mark.parametrize(
    "later", [{"zero": -0.0}, {"zero": 0}, {"one": True}, {"one": 1.0}, {"nested": {"values": [-0.0, 1.0]}}]
)
def test_a_record_keeps_the_text_of_values_that_python_calls_equal(later):
    """Its hash is that of its text."""
    assert json.dumps(share_equal_values(later, EARLIER)) == json.dumps(later)
