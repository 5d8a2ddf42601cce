"""A worker that speaks the language of events but trains nothing: real ranks under real torchrun, in a second.

The size of the cell says what it does at step 2 of 3.
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


def told_to_stop(number, frame):
    if behaviour == "ignores_sigterm":
        return
    events.write("terminated", signal=number)
    os._exit(143)


def breathe():
    while True:
        time.sleep(0.5)
        events.write("heartbeat", **where, since=since)


def move(step, phase, *, say=True):
    global where, since
    where, since = {"stage": "measure", "step": step, "of": 3, "phase": phase}, time.time()
    state_file.write(RankState(**where, since=since))
    if say:
        events.write("progress", **where)


def fail(status, kind, message, *, secondary=False):
    fields = {"status": status, "type": kind, "message": message, "traceback": "Traceback ...", "secondary": secondary}
    events.write("error", **fields, phase=where["phase"], stage="measure", step=where["step"])
    sys.exit(1)


def wait_for_rank_1():
    """What a collective does: it ends in error when the other rank is gone."""
    other = out / "pid1"
    while not other.exists() or Path(f"/proc/{other.read_text()}/cmdline").read_bytes():
        time.sleep(0.05)
    fail("crash", "DistBackendError", "Connection closed by peer", secondary=behaviour != "claims_innocence_wrongly")


signal.signal(signal.SIGTERM, told_to_stop)
events.write("start", pid=os.getpid())
move(1, "forward")
(out / f".pid{rank}").write_text(str(os.getpid()))
(out / f".pid{rank}").rename(out / f"pid{rank}")
threading.Thread(target=breathe, daemon=True).start()
if behaviour == "healthy":
    # In a session of its own, its parent soon dead: nothing but the environment leads to it.
    subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
move(2, "forward")

if behaviour == "healthy":
    pass
elif behaviour == "unsupported":
    fail("unsupported", "UnsupportedError", "not on this machine")
elif behaviour == "slow":
    for step in range(3, 200):
        move(step, "forward")
        time.sleep(0.1)
elif behaviour == "garbles":
    (out / "events-rank0.jsonl").open("a").write("not an event\n")
    time.sleep(60)
elif behaviour == "sleeps":
    time.sleep(3600)
elif rank == 0:
    move(2, "backward")
    wait_for_rank_1()
elif behaviour == "raises":
    fail("crash", "RuntimeError", "boom")
elif behaviour == "claims_innocence_wrongly":
    move(2, "optimizer", say=False)
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    time.sleep(3600)  # ignores_sigterm

move(3, "sync")
observed = {"backend": job["cell"]["backend"], "world_size": world, "shard_numel": 1, "device": "cpu"}
result = {"rank": rank, "world_size": world, "observed": observed, "step_time_s": [0.1] * job["measure"]["steps"]}
write_json(out / f"rank{rank}.json", result)
events.write("done")
