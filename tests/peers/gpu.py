"""Time training steps beside those of lerobot's own code on one GPU: `python -m tests.peers.gpu --lerobot FOLDER`.

Both sides train the same policy in full size: weights, batch and hyperparameters of AdamW. Each runs in a process of its own,
lerobot with the packages of FOLDER before those of this Python. Weights, gradients and Adam's state of a full policy take up to
60 GB, so that sides are divided into waves, each of which fits. The sides of a wave compile in parallel, then take turns.
Written to `reports/peers/` after each wave: `gpu.md`, and all times in `gpu.json`. Without a GPU all of it runs on a CPU, as a
rehearsal.

Precisions are compared like for like: lerobot's `dtype=bfloat16` with the recipes bf16_pure and bf16_master, which also keeps
float32 masters, and its float32 parameters under autocast with fp32_autocast.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from tests.parity.lerobot import VERSION
from tests.peers.equality import check_hyperparameters
from tests.peers.policies import GPU_PEERS
from tests.peers.report import render_gpu_report
from tests.peers.side import HERE, Side

ROOT = HERE.parents[1]
REPORTS = ROOT / "reports" / "peers"
# The sides of each wave: variant and precision; precisions of lerobot are those of `theirs.py`.
WAVES = {
    "bfloat16": (("sdpa compiled", "bf16_pure"), ("eager", "bfloat16")),
    "masters": (("sdpa compiled", "bf16_master"), ("sdpa", "bf16_pure")),
    "autocast": (("sdpa compiled", "fp32_autocast"),),
    "autocast-eager": (("eager", "autocast"),),
    "bfloat16-compiled": (("eager compiled", "bfloat16"),),
    "autocast-compiled": (("eager compiled", "autocast"),),
    "uncompiled": (("sdpa", "bf16_master"),),
    "autocast-uncompiled": (("sdpa", "fp32_autocast"),),
}
# lerobot compiles its whole model, for minutes: from the start, and while other waves take their turns.
COMPILED_AHEAD = ("bfloat16-compiled", "autocast-compiled")
DEFAULT_WAVES = tuple(WAVES)[:5]
THEIR_PRECISIONS = {"bf16_pure": "bfloat16", "bf16_master": "bfloat16", "fp32_autocast": "autocast"}
START = time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.peers.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--lerobot", type=Path, required=True, help="folder with lerobot and what it needs beside this Python's"
    )
    parser.add_argument("--peer", choices=sorted(GPU_PEERS), default="pi05-full")
    parser.add_argument("--batch", type=int, help="samples of a step")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side; five are needed for an interval")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a turn, which one more precedes")
    parser.add_argument("--waves", nargs="*", choices=WAVES, default=DEFAULT_WAVES, help="in this order")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end after so many seconds, with what there is")
    parser.add_argument("--note", help="what else has to be known of this run, for the report")
    parser.add_argument("--out", type=Path, default=REPORTS)
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or GPU_PEERS[arguments.peer].batch
    with tempfile.TemporaryDirectory() as directory:
        return Comparison(arguments, Path(directory)).run()


class Comparison:
    """The waves of a comparison and what they have measured."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._deadline = START + arguments.limit_s
        self._sides: list[dict[str, Any]] = []
        self._parameters = 0

    def run(self) -> int:
        """Run the waves, and return 0 if every side has taken its turns."""
        arguments = self._arguments
        waves = {name: [self._side(*side) for side in WAVES[name]] for name in arguments.waves}
        all_sides = [side for sides in waves.values() for side in sides]
        command = [sys.executable, "-m", "tests.peers.prepare", arguments.peer, str(arguments.batch), str(self._folder)]
        preparation = subprocess.Popen(command, cwd=ROOT)
        try:
            queue = list(waves.items())
            ahead = [side for name in arguments.waves if name in COMPILED_AHEAD for side in waves[name]]
            for side in dict.fromkeys([*ahead, *queue[0][1]]):
                side.launch()
            remaining_s = None if self._deadline == float("inf") else max(0.0, self._deadline - time.monotonic())
            if preparation.wait(remaining_s):
                return 1
            progress("weights written")
            self._parameters = json.loads((self._folder / "request.json").read_text())["parameters"]
            for side in ahead:
                side.tell("go")
            for number, (name, sides) in enumerate(queue):
                if time.monotonic() > self._deadline:
                    progress(f"the time is up before the wave {name}")
                    return 1
                following = queue[number + 1][1] if number + 1 < len(queue) else []
                self._run_wave(name, sides, following)
                self._write()
        finally:
            preparation.kill()
            for side in all_sides:
                side.end()
        return int(any("error" in side for side in self._sides))

    def _side(self, variant: str, precision: str) -> Side:
        arguments = self._arguments
        log = self._folder / f"{variant} {precision}.log"
        if precision in THEIR_PRECISIONS:
            command = [sys.executable, "-m", "tests.peers.ours", arguments.peer, variant, "--recipe", precision]
            command += ["--batch", str(arguments.batch), "--folder", str(self._folder)]
            return Side("benchbox", variant, command, dict(os.environ), precision, log)
        command = [sys.executable, "-W", "ignore", str(HERE / "theirs.py"), str(self._folder), variant]
        command += ["--precision", precision, "--waits"]
        variables = {**os.environ, "PYTHONPATH": str(arguments.lerobot.resolve()), "HF_HUB_OFFLINE": "1"}
        # Half of the cores, because others take their turns while this side compiles.
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // 2)))
        return Side(VERSION, variant, command, variables, precision, log)

    def _run_wave(self, name: str, sides: list[Side], following: list[Side]) -> None:
        """Let the sides build and compile, launch those of the following wave, which only import yet, then take turns."""
        arguments, running = self._arguments, list(sides)
        failures: dict[Side, str] = {}

        def attempt(side: Side, action: Any, *values: Any) -> None:
            if side not in failures:
                try:
                    action(*values, self._deadline)
                except (RuntimeError, TimeoutError, BrokenPipeError) as error:
                    failures[side] = str(error).removeprefix(f"{side.label}: ")
                    progress(f"{side.label}: {failures[side]}")
                    side.end()

        for side in running:
            attempt(side, lambda _, side=side: side.tell("go"))
        for side in reversed(running):  # the first ones compile
            attempt(side, side.wait_ready)
            if side not in failures:
                progress(f"{name}: {side.label} has taken a step")
        for side in following:
            if not side.is_launched:
                side.launch()
        for number, side in product(range(1, arguments.rounds + 1), running):
            attempt(side, side.take_turn, arguments.steps)
            if side not in failures:
                progress(f"{name}: round {number} of {arguments.rounds}, {side.label}, {side.last_step_ms():.1f} ms")
        for side in running:
            side.end()
            error = {"error": failures[side]} if side in failures else {}
            self._sides.append(side.result() | {"wave": name} | error)

    def _write(self) -> None:
        """Write what there is, by lerobot's precision."""
        arguments = self._arguments
        peer = GPU_PEERS[arguments.peer]
        check_hyperparameters(self._sides)
        results = []
        for precision in dict.fromkeys(THEIR_PRECISIONS.values()):
            sides = [side for side in self._sides if THEIR_PRECISIONS.get(side["precision"], side["precision"]) == precision]
            result = {
                "peer": arguments.peer,
                "policy": peer.policy,
                "size": peer.size,
                "precision": precision,
                "parameters": self._parameters,
                "batch": arguments.batch,
                "steps": arguments.steps,
                "sides": sides,
            }
            results += [result] if sides else []
        note = {"note": arguments.note} if arguments.note else {}
        run = {"command": self._command(), **self._machine(), **note, "results": results}
        report = render_gpu_report(run)
        print(report, flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gpu.json").write_text(json.dumps(run, indent=1) + "\n")
        (arguments.out / "gpu.md").write_text(report)

    def _command(self) -> str:
        """Return the command without the folders of this machine."""
        arguments = self._arguments
        words = ["--peer", arguments.peer, "--batch", arguments.batch, "--rounds", arguments.rounds, "--steps", arguments.steps]
        words += ["--waves", *arguments.waves]
        return f"python -m tests.peers.gpu --lerobot FOLDER {shlex.join(map(str, words))}"

    def _machine(self) -> dict[str, str]:
        first = next((side for side in self._sides if "device" in side), {})
        theirs = next((side for side in self._sides if "transformers" in side), {})
        return {
            "device": first.get("device", ""),
            "torch": first.get("torch", ""),
            "transformers": theirs.get("transformers", ""),
        }


def progress(text: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
