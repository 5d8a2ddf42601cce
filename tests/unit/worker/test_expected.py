"""Attention kernels that were requested and those that ran, compared by call site."""

from __future__ import annotations

import pytest

from benchbox.errors import MismatchError
from benchbox.worker.expected import check_step
from tests.support.ranks import tiny_cell

VISION, BACKBONE = "vision.layers.*", "backbone.layers.*"


def check(requested: str, sites: dict[str, list[str]]) -> None:
    kernel = "+".join(dict.fromkeys(name for kernels in sites.values() for name in kernels))
    check_step(tiny_cell(attention=requested), kernel=kernel, sites=sites, checkpointed=None, stepped=[])


@pytest.mark.parametrize(
    ("requested", "sites"),
    [
        ("flex", {VISION: ["sdpa:flash"], BACKBONE: ["flex"]}),
        ("sdpa", {VISION: ["sdpa:flash_cpu"], BACKBONE: ["eager"]}),
        ("sdpa", {VISION: ["sdpa:flash_cpu"], BACKBONE: ["sdpa:flash_cpu", "sdpa:math"]}),
        ("eager", {VISION: ["eager"], BACKBONE: ["eager"]}),
    ],
)
def test_a_site_for_which_the_requested_kernel_does_not_exist_may_run_its_fallback(requested: str, sites: dict) -> None:
    """A vision tower has no mask, which `flex` is for; scores with a soft cap have no `sdpa`."""
    check(requested, sites)


@pytest.mark.parametrize(
    ("requested", "sites", "message"),
    [
        ("flex", {VISION: ["sdpa:flash"], BACKBONE: ["sdpa:flash"]}, "requested flex attention, observed sdpa:flash$"),
        ("flex", {BACKBONE: ["sdpa:math", "flex"]}, r"observed sdpa:math\+flex in backbone.layers"),
        ("sdpa", {BACKBONE: ["sdpa:flash", "eager"]}, r"observed sdpa:flash\+eager in backbone.layers"),
        ("sdpa", {VISION: ["sdpa:flash"], BACKBONE: ["flex"]}, r"requested sdpa attention, observed sdpa:flash\+flex"),
        ("eager", {VISION: ["sdpa:flash"], BACKBONE: ["eager"]}, r"requested eager attention, observed sdpa:flash\+eager"),
    ],
)
def test_any_other_mixture_is_a_mismatch(requested: str, sites: dict, message: str) -> None:
    """The requested kernel ran nowhere, one site ran it beside another, or what ran is no fallback for it."""
    with pytest.raises(MismatchError, match=message):
        check(requested, sites)
