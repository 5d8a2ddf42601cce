"""Attention kernels by call site and sizes of micro-batches: those that were requested and those that were observed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from benchbox.errors import MismatchError
from benchbox.worker.expected import check_micro_batches, check_step
from tests.support.ranks import tiny_cell

if TYPE_CHECKING:
    from benchbox.registry.launch_record import PartSizes

VISION, BACKBONE = "vision.layers.*", "backbone.layers.*"


def check(requested: str, sites: dict[str, list[str]]) -> None:
    kernel = "+".join(dict.fromkeys(name for kernels in sites.values() for name in kernels))
    check_step(tiny_cell(attention=requested), kernel=kernel, sites=sites, checkpointed=None, products={}, stepped=[])


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


def sizes(smallest: int, largest: int, spec: int) -> dict[str, PartSizes]:
    return {
        "cameras": {"smallest": 2, "largest": 2, "spec": 2},
        "prompt": {"smallest": smallest, "largest": largest, "spec": spec},
    }


@pytest.mark.parametrize(
    ("padding", "observed"),
    [("full", sizes(48, 48, 48)), ("longest", sizes(48, 48, 48)), ("longest", sizes(16, 32, 48)), ("full", None)],
)
def test_micro_batches_may_be_as_large_as_the_spec_and_smaller_without_full_padding(padding: str, observed: Any) -> None:
    check_micro_batches(tiny_cell(padding=padding), observed)


@pytest.mark.parametrize(
    ("padding", "observed", "message"),
    [
        (
            "full",
            sizes(16, 48, 48),
            "requested padding full, observed micro-batches that were cut: prompt 16 to 48 of 48 tokens$",
        ),
        ("full", sizes(16, 64, 48), "micro-batches of impossible sizes: prompt 16 to 64 of 48 tokens$"),
        ("longest", sizes(64, 64, 48), "micro-batches of impossible sizes: prompt 64 of 48 tokens$"),
        ("longest", sizes(0, 16, 48), "micro-batches of impossible sizes: prompt 0 to 16 of 48 tokens$"),
    ],
)
def test_micro_batches_of_other_sizes_are_a_mismatch(padding: str, observed: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        check_micro_batches(tiny_cell(padding=padding), observed)


@pytest.mark.parametrize(
    ("products", "matches"),
    [
        ({"bfloat16": 126, "float32": 160}, True),
        ({"bfloat16": 20, "float32": 300}, False),
        ({"float32": 69}, False),
        ({}, True),
    ],
)
def test_a_recipe_in_whose_dtype_hardly_any_product_runs_is_a_mismatch_and_a_tower_in_float32_is_none(
    products: dict[str, int], matches: bool
) -> None:
    cell = tiny_cell(recipe="bf16_master")
    if matches:
        check_step(cell, kernel=None, checkpointed=None, products=products, stepped=[])
        return
    with pytest.raises(MismatchError, match="recipe bf16_master computes in bfloat16, observed matrix products: "):
        check_step(cell, kernel=None, checkpointed=None, products=products, stepped=[])
