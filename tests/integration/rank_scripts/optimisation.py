"""Steps of a small policy with parameter groups, a frozen backbone, averages and spikes: `optimisation.py JOB.json`, the job
being `{"backends": [name, ...], "out": folder}`.

For each backend every rank writes `<backend>-<rank>.pt`: what it saw of each session of `SESSIONS`, by the session's name.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from benchbox.backends.base import StepShape
from benchbox.observer.introspect.tensors import local_shard
from benchbox.registry.backends import backend_info
from benchbox.registry.contracts import Losses, Role
from benchbox.registry.recipes import recipe_by_name
from benchbox.session import Session
from benchbox.spec.optim import GroupSpec, OptimSpec, SpikeSpec
from tests.integration.rank_scripts.cells import forget, trained, unwrapped_name, whole_gradients

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 16
ACCUMULATION = 2
GROUPS = OptimSpec(
    lr=1e-2,
    weight_decay=0.5,
    head_lr=3e-3,
    head_weight_decay=0.3,
    max_grad_norm=1e6,
    schedule="constant",
    groups=(
        GroupSpec(match="vision.*", lr=2e-3, weight_decay=0.9, betas=(0.5, 0.6)),
        GroupSpec(match="*.norm.*", lr=0.0),
    ),
)
FREEZE_STEPS, SPIKE_STEPS, STEPS = 2, (4, 5), 7
PHASED = OptimSpec(
    lr=1e-2,
    weight_decay=0.5,
    schedule="constant",
    freeze_backbone_steps=FREEZE_STEPS,
    thaw_warmup_steps=1,
    ema_decay=0.5,
    spike=SpikeSpec(max=1e3),
)
SESSIONS = {"groups": ("fp32", GROUPS, 3), "phased": ("bf16_master", PHASED, STEPS)}


class Block(nn.Module):
    """A layer and its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.norm(torch.tanh(self.linear(hidden)))


class Towers(nn.Module):
    """A vision tower, a backbone and a head, of one block each, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision, self.backbone, self.head = Block(), Block(), Block()
        self.projection = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> Losses:
        hidden = batch["state"].to(self.projection.weight.dtype)
        for tower in (self.vision, self.backbone, self.head, self.projection):
            hidden = tower(hidden)
        square = (hidden.float() - batch["action"]).square().mean()
        return Losses(square, {"square": square.detach()})

    def layer_units(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def parameter_roles(self) -> dict[str, Role]:
        return {
            name: Role("head" if name.startswith(("head", "projection")) else "backbone", decay=parameter.dim() > 1)
            for name, parameter in self.named_parameters()
        }


def micro_batches(rank: int, poisoned: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches of this rank; those of the first poisoned step are NaN on rank 0, of the others 10^4 as large."""
    generator = torch.Generator().manual_seed(1 + rank)
    step = 0
    while True:
        scale = 1.0 if step not in poisoned else 1e4 if step > poisoned[0] else float("nan") if rank == 0 else 1.0
        for _ in range(ACCUMULATION):
            state, action = torch.randn(2, 4, WIDTH, generator=generator)
            yield {"state": state, "action": action * 3.0 * scale}
        step += 1


class GradientKeeper:
    """An instrument that keeps the whole gradient of every step, and whether the backbone had one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._phase = "optimizer" if "clip" in session.backend.fused_phases else "clip"
        self.whole: list[dict[str, Tensor]] = []
        self.computed: list[bool] = []

    def step(self) -> AbstractContextManager[None]:
        return nullcontext()

    def phase(self, name: str) -> AbstractContextManager[None]:
        model = self._session.model
        if name == self._phase and type(self._session.backend).name.startswith("zero"):
            self.computed.append(True)
        elif name == self._phase:
            gradients = {unwrapped_name(key): parameter.grad for key, parameter in model.named_parameters()}
            present = [g is not None and local_shard(g).numel() > 0 for key, g in gradients.items() if key.startswith("vision")]
            self.computed.append(any(present))
        if name == self._phase and self._session.averages is None:
            self.whole.append({unwrapped_name(key): gradient for key, gradient in whole_gradients(model)})
        return nullcontext()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights that are stepped, whole."""
    if type(model).__name__ == "DeepSpeedEngine":
        from deepspeed.utils import safe_get_full_fp32_param

        return {unwrapped_name(name): safe_get_full_fp32_param(parameter).clone() for name, parameter in trained(model)}
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {unwrapped_name(name): parameter.detach().clone() for name, parameter in trained(model)}
    return {
        unwrapped_name(name): (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in trained(model)
    }


def stepped(session: Session) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in session.backend.stepped_tensors().items()}


def moments(session: Session) -> Tensor:
    """Return the first moments that this rank has, in one tensor."""
    states = [state["exp_avg"] for state in session.backend.prepared.stepping.state.values() if state]
    return torch.cat([local_shard(moment).detach().flatten().clone() for moment in states] or [torch.zeros(0)])


def evaluated(session: Session, batch: dict[str, Tensor]) -> float:
    with torch.no_grad(), session.backend.compute():
        return float(session.model(batch).total)


def trace(backend_name: str, recipe: str, optim: OptimSpec, steps: int, rank: int) -> dict[str, Any]:
    backend = backend_info(backend_name).load()()
    os.environ.update(backend.environment())
    shape = StepShape(batch=4, accumulation=ACCUMULATION, max_grad_norm=optim.max_grad_norm)
    backend.prepare(Towers(), recipe_by_name(recipe), optim, shape)
    session = Session(backend, accumulation=ACCUMULATION, optim=optim)
    keeper, batches = GradientKeeper(session), micro_batches(rank, SPIKE_STEPS if optim.spike else ())
    rows = [{"stepped": stepped(session)}]
    for _ in range(steps):
        result = session.step(batches, keeper)
        row = {"lr": result.lr, "skipped": result.skipped, "grad_norm": float(result.grad_norm), "loss": float(result.loss)}
        row |= {"stepped": stepped(session), "moments": moments(session)}
        if session.spikes is not None and not result.skipped:
            row["judged_norm"] = session.spikes._norms[-1]
        if session.averages is not None:
            row["averages"] = {name: tensor.clone() for name, tensor in session.averages.tensors.items()}
        rows.append(row)
    values: dict[str, Any] = {"rows": rows, "gradients": keeper.whole, "computed": keeper.computed}
    values["groups"] = [
        {key: group[key] for key in ("name", "betas", "weight_decay")} for group in backend.prepared.stepping.param_groups
    ]
    if session.averages is None:
        return values | {"weights": whole_weights(session.model)}
    batch = next(micro_batches(rank, ()))
    values["loss_before"] = evaluated(session, batch)
    with session.averaged_weights():
        values["loss_inside"] = evaluated(session, batch)
        values["stepped_inside"] = stepped(session)
    values["stepped_after"], values["loss_after"] = stepped(session), evaluated(session, batch)
    values["loss_next"] = float(session.step(batches).loss)
    return values


def main(job_file: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(job_file).read_text())
    rank = int(os.environ.get("RANK", "0"))
    for name in job["backends"]:
        traces = {}
        for key, (recipe, optim, steps) in SESSIONS.items():
            traces[key] = trace(name, recipe, optim, steps, rank)
            forget()
        torch.save(traces, Path(job["out"]) / f"{name}-{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
