"""Settings of backends, read from live objects."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchbox.backends.settings import _combine, _read, read_settings

if TYPE_CHECKING:
    from pathlib import Path


class Prefetch(Enum):
    PRE = 1


def test_one_process_has_settings_of_its_optimizer_alone() -> None:
    model = nn.Linear(2, 1)
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    assert read_settings(model, [fused]) == {"optimizer_fused": True, "optimizer_foreach": None}


@pytest.mark.parametrize(
    ("values", "combined"),
    [
        ([], None),
        ([None, None], None),
        ([True, True], True),
        ([True, False], "False, True"),
        ([torch.bfloat16], "bfloat16"),
        ([Prefetch.PRE, Prefetch.PRE], "PRE"),
        ([25, 26], "25, 26"),
    ],
)
def test_units_with_one_value_share_it_and_different_ones_are_all_named(values: list, combined: object) -> None:
    assert _combine(values) == combined


def test_an_attribute_that_a_library_lacks_is_null() -> None:
    """Private attributes come and go with versions, and none is worth a failed measurement."""
    assert _read([SimpleNamespace(_use_orig_params=True)], ("_use_orig_params", "_offload_params")) == {
        "use_orig_params": True,
        "offload_params": None,
    }


def foreign_hook(_, bucket):
    return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.parametrize(
    ("hook", "dtype"), [(None, "float32"), (default_hooks.fp16_compress_hook, "float16"), (foreign_hook, None)]
)
def test_the_dtype_of_reductions_is_that_of_the_hook_of_ddp_and_unknown_of_a_foreign_one(
    tmp_path: Path, hook: Any, dtype: str | None
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(4, 2))
        if hook is not None:
            model.register_comm_hook(None, hook)
        settings = read_settings(model, [torch.optim.AdamW(model.parameters())])
    finally:
        dist.destroy_process_group()
    assert (settings["reduce_dtype"], settings["comm_hook"]) == (dtype, None if hook is None else hook.__name__)


@pytest.mark.parametrize("reshards", [True, False])
def test_whether_fsdp2_frees_parameters_after_forward_is_read_from_its_groups(tmp_path: Path, reshards: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshards)
        settings = read_settings(model, [torch.optim.AdamW(model.parameters())])
    finally:
        dist.destroy_process_group()
    assert settings["reshard_after_forward"] is reshards


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        (MixedPrecisionPolicy(), ("float32", "float32")),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), ("bfloat16", "bfloat16")),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), ("bfloat16", "float32")),
    ],
)
def test_fsdp2_reduces_in_the_dtype_of_its_policy_else_in_that_of_gathered_parameters(
    tmp_path: Path, policy: MixedPrecisionPolicy, dtypes: tuple[str, str]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
        model(torch.zeros(1, 4))  # the dtypes of the policy are resolved in the first forward pass
        settings = read_settings(model, [torch.optim.AdamW(model.parameters())])
    finally:
        dist.destroy_process_group()
    assert (settings["param_dtype"], settings["reduce_dtype"]) == dtypes
