"""Numbers formatted for people."""

from __future__ import annotations

import pytest

from benchbox.analysis.quantities import quantity


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.20344, "s", "203 ms"),
        (0.0020344, "s", "2.03 ms"),
        (6.633, "s", "6.63 s"),
        (12.345, "s", "12.3 s"),
        (0, "bytes", "0 B"),
        (1023, "bytes", "1023 B"),
        (1024, "bytes", "1.00 KiB"),
        (1.5 * 2**30, "bytes", "1.50 GiB"),
        (78.1 * 2**30, "bytes", "78.1 GiB"),
        (26.7, "samples/s", "26.7 samples/s"),
        (999.6, "samples/s", "1000 samples/s"),
        (0.4123, "fraction", "41.2%"),
        (1.23456, "loss", "1.235"),
        (None, "s", "-"),
        (float("nan"), "loss", "nan"),
        (0, "s", "0 ms"),
    ],
)
def test_a_quantity_has_three_significant_digits_and_the_prefix_that_fits(value, unit, text):
    assert quantity(value, unit) == text
