"""Records agree with the files that their ranks wrote: results, the job, errors and events."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from benchbox.analysis.rank_file_invariants import as_ranks_wrote, errors_agree, events_agree
from benchbox.launch.job import Job
from benchbox.launch.supervise.group import _name_node
from benchbox.launch.supervise.outcome import Outcome
from benchbox.store.files import write_json
from tests.support.example_run import CELL, MEASURE, MIB, OOM, example_record, rank_result
from tests.support.host_states import busy_state, quiet_state


def test_every_figure_and_the_environment_are_compared_with_the_results_of_the_ranks(tmp_path):
    for rank in range(2):
        write_json(tmp_path / f"rank{rank}.json", rank_result(CELL, rank))
    record = example_record()
    assert as_ranks_wrote(record, tmp_path) == []
    merged = dict.fromkeys(("observed", "step_time_s", "phases_s", "throughput", "memory", "collectives", "flops"))
    merged |= dict.fromkeys(("samples", "loss", "grad_norm")) | {"step_split_s": {}}
    for key, value in (merged | {"mfu": 0.9, "hfu": 0.9, "host": quiet_state()}).items():
        assert as_ranks_wrote({**record, key: value}, tmp_path) == [f"{key} differs from the results of its ranks"]
    elsewhere = record | {"environment": record["environment"] | {"torch": "9.9"}}
    assert as_ranks_wrote(elsewhere, tmp_path) == ["environment.torch differs from the results of its ranks"]


def test_steps_and_the_memory_limit_are_compared_with_the_job_of_the_ranks(tmp_path):
    for rank in range(2):
        write_json(tmp_path / f"rank{rank}.json", rank_result(CELL, rank))
    write_json(tmp_path / "job.json", {"measure": asdict(replace(MEASURE, memory_limit=200 * MIB))})
    record = example_record() | {"memory_limit_bytes": 200 * MIB}
    assert as_ranks_wrote(record, tmp_path) == []
    for key, value in {"memory_limit_bytes": 400 * MIB, "warmup_steps": 9, "steps": 9}.items():
        assert f"{key} differs from the job of its ranks" in as_ranks_wrote({**record, key: value}, tmp_path)


def test_an_error_of_memory_is_one_that_a_rank_reported(tmp_path):
    error = OOM | {"stage": "warmup", "step": 1, "operation": None}
    record = example_record(status="oom", error=error)
    assert errors_agree(record, tmp_path) is None, "there are no events"
    event = {"t": 0.0, "monotonic_s": 1.0, "rank": 1, "event": "error", "status": "oom", **error, "traceback": "in full"}
    (tmp_path / "events-rank1.jsonl").write_text(json.dumps(event) + "\n")
    assert errors_agree(record, tmp_path) == []
    edited = record | {"error": error | {"rank": 0}}
    where = "OutOfMemoryError on rank 0 in warmup step 1, backward"
    assert errors_agree(edited, tmp_path) == [f"oom by {where}: its ranks did not report this error"]
    assert errors_agree(record | {"status": "nan"}, tmp_path) != []
    assert errors_agree(record | {"status": "crash"}, tmp_path) is None, "the launcher may have found another cause"


def test_an_error_of_several_nodes_names_the_node_of_its_rank(tmp_path):
    """The launcher adds it to what the rank has reported."""
    error = OOM | {"stage": "warmup", "step": 1, "operation": None}
    event = {"t": 0.0, "monotonic_s": 1.0, "rank": 1, "event": "error", "status": "oom", **error}
    (tmp_path / "events-rank1.jsonl").write_text(json.dumps(event) + "\n")
    job = Job(config={}, ranks=2, folder=tmp_path, timeout_s=None, hang_after_s=1.0, nnodes=2)
    outcome = _name_node(Outcome("oom", error), job)
    assert outcome.error["message"].endswith(" (on node 1)")
    assert errors_agree(example_record(status="oom", error=outcome.error), tmp_path) == []
    another = example_record(status="oom", error=outcome.error | {"message": "another (on node 1)"})
    assert len(errors_agree(another, tmp_path)) == 1


def write_events(folder, gap_s):
    """Write events of two ranks, whose steps end `gap_s` after one another."""
    for rank in range(2):
        events = [{"event": "start", "monotonic_s": 100.0}]
        events += [
            {"event": "progress", "stage": "measure", "monotonic_s": 100.0 + step * gap_s} for step in range(MEASURE.steps + 1)
        ]
        events.append({"event": "done", "monotonic_s": 100.0 + MEASURE.steps * gap_s})
        lines = [json.dumps({"t": 0.0, "rank": rank, **event}) + "\n" for event in events]
        (folder / f"events-rank{rank}.jsonl").write_text("".join(lines))


def test_steps_that_are_much_shorter_than_the_time_between_their_events_are_a_violation_on_a_quiet_host(tmp_path):
    record = example_record()
    record["step_time_s"]["per_rank"] = [[0.1] * MEASURE.steps] * 2
    write_events(tmp_path, 0.11)
    assert events_agree(record, tmp_path) == []
    short = record | {"duration_s": 0.3}
    assert events_agree(short, tmp_path) == [
        f"rank {rank}: events over 0.440 s, and the launch took 0.300 s" for rank in range(2)
    ]
    write_events(tmp_path, 0.3)
    assert events_agree(record, tmp_path) == [
        f"rank {rank}: the steps took 0.4000 s, and their events 1.2000 s" for rank in range(2)
    ]
    assert events_agree(record | {"host": busy_state()}, tmp_path) == [], "others may run between a step and its event"
