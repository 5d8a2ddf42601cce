"""A worker that writes the files of a rank but trains nothing, so that real ranks under real torchrun take a second.

The size of the cell selects what happens at step 2 of 3.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchbox.registry.phases import RankState
from benchbox.store.events import EventWriter
from benchbox.store.files import write_json
from benchbox.store.rank_state import RankStateFile

job = json.loads(Path(sys.argv[1]).read_text())
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
behaviour = job["cell"]["size"]
out = Path(job["out"])

if behaviour == "dies_at_import":
    sys.exit("no such luck")

events = EventWriter(out / f"events-rank{rank}.jsonl", rank)
state_file = RankStateFile(out / f"state-rank{rank}")
stacks = (out / f"stack-rank{rank}.txt").open("w")
faulthandler.register(signal.SIGUSR2, file=stacks)


def on_sigterm(number, frame):
    if behaviour == "ignores_sigterm":
        return
    events.write("terminated", signal=number)
    os._exit(143)


def write_heartbeats():
    while True:
        time.sleep(0.5)
        events.write("heartbeat", **state, since=since)


def enter(step, phase, *, report=True):
    global state, since
    state, since = {"stage": "measure", "step": step, "of": 3, "phase": phase}, time.monotonic()
    state_file.write(RankState(**state, since=since))
    if report:
        events.write("progress", **state)


def fail(status, kind, message, *, secondary=False):
    fields = {"status": status, "type": kind, "message": message, "traceback": "Traceback ...", "secondary": secondary}
    events.write("error", **fields, phase=state["phase"], stage="measure", step=state["step"])
    sys.exit(1)


def wait_for_rank_1():
    """Block like a collective, which raises when the other rank has died."""
    peer = out / "pid1"
    while not peer.exists() or Path(f"/proc/{peer.read_text()}/cmdline").read_bytes():
        time.sleep(0.05)
    fail("crash", "DistBackendError", "Connection closed by peer", secondary=behaviour != "claims_innocence_wrongly")


signal.signal(signal.SIGTERM, on_sigterm)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # torchrun blocks it
events.write("start", pid=os.getpid())
enter(1, "forward")
(out / f".pid{rank}").write_text(str(os.getpid()))
(out / f".pid{rank}").rename(out / f"pid{rank}")
threading.Thread(target=write_heartbeats, daemon=True).start()
if behaviour == "healthy":
    # In a session of its own, its parent soon dead: nothing but the environment leads to it.
    subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
enter(2, "forward")

if behaviour == "healthy":
    pass
elif behaviour == "unsupported":
    fail("unsupported", "UnsupportedError", "not on this machine")
elif behaviour == "slow":
    for step in range(3, 200):
        enter(step, "forward")
        time.sleep(0.1)
elif behaviour == "garbles":
    (out / "events-rank0.jsonl").open("a").write("not an event\n")
    time.sleep(60)
elif behaviour == "sleeps":
    time.sleep(3600)
elif rank == 0:
    enter(2, "backward")
    wait_for_rank_1()
elif behaviour == "raises":
    fail("crash", "RuntimeError", "boom")
elif behaviour == "claims_innocence_wrongly":
    enter(2, "optimizer", report=False)
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    time.sleep(3600)  # ignores_sigterm

enter(3, "sync")
observed = {"backend": job["cell"]["backend"], "world_size": world, "shard_numel": 1, "total_numel": 1, "device": "cpu"}
observed |= {"model_class": "StandIn", "optimizer_chain": [], "sharding": None}
observed |= {"attention_kernel": None, "checkpointed_modules": None}
result = {"rank": rank, "world_size": world, "observed": observed, "step_time_s": [0.1] * job["measure"]["steps"]}
write_json(out / f"rank{rank}.json", result)
events.write("done")
