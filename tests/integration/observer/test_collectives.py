from __future__ import annotations

import pytest

from tests.integration.rank_scripts.collectives import ELEMENTS

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_ddp_reduces_every_gradient_once_in_the_dtype_of_the_parameters(two_ranks, dtype, size):
    for rank in two_ranks:
        assert rank[f"ddp {dtype}"]["counts"] == {"all_reduce": {"count": 1, "bytes": ELEMENTS * size}}
        assert rank[f"ddp {dtype}"]["dtypes"] == {"all_reduce": [dtype]}


@pytest.mark.parametrize("backend", ["fsdp1", "fsdp2"])
def test_sharding_gathers_the_whole_and_scatters_the_whole(two_ranks, backend):
    """The bytes are those of the whole layer, not of one rank's shard; FSDP's root is not resharded after forward."""
    for rank in two_ranks:
        counts = rank[backend]["counts"]
        assert counts["all_gather"] == {"count": 1, "bytes": ELEMENTS * 4}
        assert counts["reduce_scatter"] == {"count": 1, "bytes": ELEMENTS * 4}


def test_collectives_inside_dtensor_operations_are_counted(two_ranks):
    """The norm of FSDP2's gradients is a DTensor whose partial sums an all-reduce completes."""
    for rank in two_ranks:
        assert rank["fsdp2"]["counts"]["all_reduce"]["count"] >= 1
