"""Take steps of benchbox's session when told to: `python -m tests.peers.ours PEER VARIANT`, see `tests.peers.side`.

With `--folder` the weights are read from there, on the GPU if there is one, once a line of standard input has come. With
`--kernels` the turns repeat the kernels of the first step alone.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from benchbox.backends.replicated import Single
from benchbox.observer.hooks.dispatch import OperationDispatchMode
from benchbox.session.build import prepare_session
from benchbox.spec.cell import Cell, DataSpec, OptimSpec
from tests.peers.kernels import StepKernels
from tests.peers.policies import GPU_PEERS, TRIMMED, batch_of, build_peer, load_peer, trimmed_batch
from tests.peers.turns import LEARNING_RATE, answer_turns, optim_in_force

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchbox.measure.phases import Instrument
    from benchbox.registry.contracts import AttentionKernel, Batch, CompileMode, Policy
    from benchbox.session import Session
    from tests.peers.policies import Peer

    Step = Callable[[Instrument], torch.Tensor]

OPTIM = OptimSpec(lr=LEARNING_RATE, weight_decay=0.0, schedule="constant", warmup_steps=0)
COMPILED: dict[str, CompileMode] = {"": "off", "compiled": "blocks", "compiled as a whole": "model"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.ours")
    parser.add_argument("peer", choices=sorted(GPU_PEERS))
    parser.add_argument("variant", help=f"the attention kernel, a key of COMPILED after a space, and at the end '{TRIMMED}'")
    parser.add_argument("--recipe", default="fp32")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries may print
    if arguments.folder:
        sys.stdin.readline()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    peer = GPU_PEERS[arguments.peer]
    peer = replace(peer, batch=arguments.batch or peer.batch)
    set_up = arguments.variant.removesuffix(TRIMMED)
    kernel, _, compiled = set_up.partition(" ")
    attention = cast("AttentionKernel", kernel)
    if arguments.folder:
        policy = load_peer(peer, attention, arguments.folder / "weights", device)
    else:
        policy = build_peer(peer, attention)
    batch = batch_of(policy, peer)
    if set_up != arguments.variant:
        batch = trimmed_batch(policy, batch)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    session, step = prepare_step(
        peer,
        policy,
        batch,
        attention=attention,
        compile=COMPILED[compiled],
        padding="full" if set_up == arguments.variant else "longest",
        recipe=arguments.recipe,
    )
    answer_turns(
        kernels_of(step) if arguments.kernels else step,
        session.backend.zero_grad,
        session.device,
        optim_in_force(session.backend.prepared.stepping.param_groups, OPTIM.max_grad_norm),
        answers,
    )


def prepare_step(peer: Peer, policy: Policy, batch: Batch, **axes: Any) -> tuple[Session, Step]:
    """Return a session of the policy, and its step on the batch under an instrument, which returns the loss.

    Args:
        axes: of the cell: its kernel of attention, and what differs from its defaults.
    """
    cell = Cell(
        policy=peer.policy,
        size=peer.size,
        backend="single",
        world_size=1,
        batch=peer.batch,
        data=DataSpec(kind="synthetic", workers=0),
        optim=OPTIM,
        **{"recipe": "fp32", **axes},
    )
    session, batches = prepare_session(cell, policy, Single()), repeat(batch)
    return session, lambda instrument: session.step(batches, instrument).loss


def kernels_of(step: Step) -> Step:
    """Take a step; return a function that repeats its kernels, and returns the loss that they were called for."""
    kernels = StepKernels()
    with OperationDispatchMode(kernels):
        loss = step(kernels)

    def repeat_kernels(instrument: Instrument) -> torch.Tensor:
        kernels.repeat(instrument)
        return loss

    return repeat_kernels


if __name__ == "__main__":
    main()
