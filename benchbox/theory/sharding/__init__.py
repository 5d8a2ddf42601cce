"""Memory of a rank under each backend, and when it needs it: one module for each way of sharding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.theory.sharding.fsdp1 import Fsdp1Model
from benchbox.theory.sharding.fsdp2 import Fsdp2Model
from benchbox.theory.sharding.replicated import DdpModel, SingleModel
from benchbox.theory.sharding.zero import Zero12Model
from benchbox.theory.sharding.zero3 import Zero3Model

if TYPE_CHECKING:
    from benchbox.theory.sharding.base import MemoryModel

MODELS: dict[str, type[MemoryModel]] = {
    "single": SingleModel,
    "ddp": DdpModel,
    "fsdp1_full": Fsdp1Model,
    "fsdp1_grad_op": Fsdp1Model,
    "fsdp1_hybrid": Fsdp1Model,
    "fsdp1_hybrid_grad_op": Fsdp1Model,
    "fsdp2": Fsdp2Model,
    "hsdp": Fsdp2Model,
    "zero1": Zero12Model,
    "zero2": Zero12Model,
    "zero3": Zero3Model,
}
