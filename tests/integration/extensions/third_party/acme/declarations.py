"""The declarations that plans and reports read. Nothing here imports torch."""

from __future__ import annotations

from typing import Any

from benchbox.registry.backends import BackendInfo
from benchbox.registry.metrics import Metric
from benchbox.registry.recipes import Recipe

DDP_BF16 = BackendInfo(
    name="acme_ddp_bf16",
    summary="DDP whose communication hook reduces gradients in bfloat16",
    target="acme.backend:DdpBf16",
    recognise="acme.backend:recognise",
    supports_recipe=lambda recipe: recipe.storage == "float32",
    no_other_recipe_because="gradients of 16-bit parameters need no compression",
)

SGD = Recipe(
    name="acme_sgd",
    summary="float32 throughout, stepped by SGD with momentum",
    storage="float32",
    compute="float32",
    stepped="float32",
    optimizer="acme.optimizers:sgd",
)


def _loss_drop(record: Any) -> float | None:
    losses = record.get("loss")
    return losses[0] - losses[-1] if losses else None


LOSS_DROP = Metric(
    name="acme_loss_drop",
    unit="loss",
    direction="higher",
    formula="loss of the first step - loss of the last step",
    read=_loss_drop,
)
