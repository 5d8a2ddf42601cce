"""Take steps of benchbox's session when told to: `python -m tests.peers.ours PEER VARIANT`, see `tests.peers.side`."""

from __future__ import annotations

import json
import sys
from itertools import repeat

import torch

from benchbox.backends.replicated import Single
from benchbox.measure.phases import PhaseClock
from benchbox.session.build import prepare_session
from benchbox.spec.cell import Cell, DataSpec, OptimSpec
from tests.peers.policies import PEERS, batch_of, build_peer

LEARNING_RATE = 1e-4


def main(name: str, variant: str) -> None:
    torch.set_num_threads(1)
    peer = PEERS[name]
    attention, _, compiled = variant.partition(" ")
    policy = build_peer(peer, attention)
    batch = batch_of(policy, peer)
    cell = Cell(
        policy=peer.policy,
        size=peer.size,
        backend="single",
        world_size=1,
        batch=peer.batch,
        attention=attention,
        compile="blocks" if compiled else "off",
        recipe="fp32",
        data=DataSpec(kind="synthetic", workers=0),
        optim=OptimSpec(lr=LEARNING_RATE, weight_decay=0.0, schedule="constant", warmup_steps=0),
    )
    session = prepare_session(cell, policy, Single())
    clock, batches = PhaseClock(session.device), repeat(batch)
    first = float(session.step(batches, clock).loss)
    clock.drain()
    print(json.dumps({"torch": torch.__version__, "losses": [first]}), flush=True)
    for line in sys.stdin:
        losses = [session.step(batches, clock).loss for _ in range(int(line))]
        times = clock.drain()
        record = {"step_s": times.step_s, "phases_s": times.phases_s, "losses": [float(loss) for loss in losses]}
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
