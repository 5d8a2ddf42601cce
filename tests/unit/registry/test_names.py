"""Suggestions for unknown names."""

from __future__ import annotations

from benchbox.registry.names import did_you_mean


def test_a_name_that_yaml_reads_as_a_number_is_suggested_beside_others():
    """Presets of a policy may have the key 7."""
    assert did_you_mean("tny", ["tiny", 7]) == "did you mean 'tiny'?"
    assert did_you_mean("huge", {"tiny", 7}) == "one of 7, tiny"
