"""Time training steps beside those of lerobot's own code: `make peers`.

Both sides train the same policy: sizes, weights, batch and hyperparameters of AdamW. If their losses differ there is no
report. Each runs in a process of its own, lerobot in its environment in `build/parity`. They take turns, round by round, so
that other work hits both. Every variant of this side is compared with every variant of lerobot. Written to `reports/peers/`:
`peers.md`, and all times in `peers.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path

from benchbox_policies._layers.weights.export import published_state_dict
from safetensors.torch import save_file

from tests.parity.lerobot import ENVIRONMENT
from tests.parity.pi import lerobot_batch, lerobot_sizes
from tests.peers.equality import check_hyperparameters, check_losses
from tests.peers.policies import PEERS, TRIMMED, Peer, batch_of, build_peer, padding_of
from tests.peers.report import render_report
from tests.peers.side import Side

REPORTS = Path(__file__).parents[2] / "reports" / "peers"
COMPILED = ("sdpa", "sdpa compiled", "sdpa compiled as a whole")
VARIANTS = ("eager", *COMPILED, *(f"{variant}{TRIMMED}" for variant in COMPILED))
THEIR_VARIANTS = ("eager", "eager compiled")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers", description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS))
    parser.add_argument("--rounds", type=int, default=12, help="turns of each side; ten are needed for an interval of pairs")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    arguments = parser.parse_args()
    ENVIRONMENT.build()
    results = [compare(name, PEERS[name], arguments.rounds, arguments.steps) for name in arguments.peers]
    report = render_report(results)
    print(report)
    REPORTS.mkdir(parents=True, exist_ok=True)
    (REPORTS / "peers.json").write_text(json.dumps(results, indent=1) + "\n")
    (REPORTS / "peers.md").write_text(report)
    return 0


def compare(name: str, peer: Peer, rounds: int, steps: int) -> dict:
    """Return the turns of every variant of both sides."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        policy = build_peer(peer, "eager")
        batch = batch_of(policy, peer)
        (folder / "weights").mkdir()
        save_file(published_state_dict(policy), folder / "weights" / "model.safetensors")
        save_file(lerobot_batch(batch), folder / "batch.safetensors")
        (folder / "request.json").write_text(json.dumps(lerobot_sizes(peer.policy, policy)))
        ours = [Side.ours(name, variant) for variant in VARIANTS]
        theirs = [Side.theirs(folder, variant) for variant in THEIR_VARIANTS]
        sides = [*ours, Side.kernels(name, "sdpa"), *theirs]
        try:
            for side in sides:  # one after the other: they compile, and allocate what they need
                side.start()
            for number, side in product(range(1, rounds + 1), sides):
                print(f"{name}: round {number} of {rounds}, {side.label}", file=sys.stderr)
                side.take_turn(steps)
        finally:
            for side in sides:
                side.end()
    results = [side.result() for side in sides]
    check_hyperparameters(results)
    check_losses(results)
    return {
        "peer": name,
        "policy": peer.policy,
        "size": peer.size,
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "batch": peer.batch,
        "steps": steps,
        "padding": padding_of(policy, batch),
        "sides": results,
    }


if __name__ == "__main__":
    sys.exit(main())
