"""One summary a cell: the launch is the sample, the worst launch is the status."""

from __future__ import annotations

from dataclasses import asdict, replace
from statistics import mean, median

import pytest

from benchbox.analysis.summary import label, summarize, varying_fields
from benchbox.registry.metrics import metric_by_name
from benchbox.registry.phases import STEP_PARTS
from benchbox.registry.statuses import STATUSES
from tests.support.example_run import CELL, MEASURE, MIB, OOM, example_record, example_run
from tests.support.host_states import busy_state, quiet_state

ONE_LAUNCH = asdict(replace(MEASURE, launches=1))


def summary_of(*records, cell=CELL):
    return summarize(example_run([cell]), records)[0]


def test_steps_are_summarised_within_a_launch_before_launches_are_summarised():
    records = [example_record(launch=1, step_s=0.1), example_record(launch=2, step_s=0.3), example_record(launch=3, step_s=0.2)]
    medians = [median(record["step_time_s"]["slowest"]) for record in records]
    step = summary_of(*records).values["step_time_s"]
    assert (step.value, step.low, step.high, step.launches) == (median(medians), min(medians), max(medians), 3)


def test_the_peak_of_several_launches_is_the_highest():
    high, low = example_record(launch=1), example_record(launch=2)
    high["memory"]["worst"]["allocated_peak_bytes"] = 900 * MIB
    low["memory"]["worst"]["allocated_peak_bytes"] = 100 * MIB
    peak = summary_of(low, high).values["peak_allocated_bytes"]
    assert (peak.value, peak.low, peak.high) == (900 * MIB, 100 * MIB, 900 * MIB)


def test_one_failed_launch_makes_the_cell_failed_and_its_numbers_come_from_the_others():
    good = example_record(launch=2)
    summary = summary_of(example_record(launch=1, status="oom", error=OOM), good)
    assert (summary.status, summary.complete, summary.error) == ("oom", False, OOM)
    assert summary.values["step_time_s"].launches == 1
    assert summary.evidence.items() <= good.items()
    assert good.keys() - summary.evidence.keys() == {"step_time_s", "phases_s", "step_split_s", "throughput", "host"}


def test_the_host_that_is_shown_is_that_of_the_launch_that_shows_what_ran():
    late = example_record(launch=2) | {"status": "crash", "error": OOM, "host": busy_state()}
    assert summary_of(example_record(launch=1) | {"host": quiet_state()}, late).launches.host == quiet_state()
    assert summary_of(late).launches.host == busy_state()


def test_a_planned_cell_without_records_is_missing():
    summary = summary_of()
    assert (summary.status, summary.complete, summary.evidence) == ("missing", False, None)
    assert set(summary.values.values()) == {None}


def test_a_cell_is_complete_only_when_every_planned_launch_ended_ok():
    assert not summary_of(example_record(launch=1)).complete
    assert summary_of(example_record(launch=1), example_record(launch=2)).complete


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "mismatch"])
def test_the_status_of_a_cell_is_the_worst_of_its_launches_and_a_mismatch_is_the_worst_of_all(status):
    assert STATUSES[0] == "ok"
    first_launch = example_record(launch=1, status=status, error=OOM)
    assert summary_of(first_launch, example_record(launch=2)).status == status
    assert summary_of(first_launch, example_record(launch=2, status="mismatch", error=OOM)).status == "mismatch"


def test_phases_are_those_of_the_slowest_rank_and_add_up_to_its_mean_step():
    record = example_record()
    summary = summary_of(record)
    slowest = record["step_time_s"]["per_rank"][1]
    assert summary.mean_step_s() == pytest.approx(mean(slowest))
    assert sum(summary.phases.values()) == pytest.approx(mean(slowest))
    assert list(summary.phases) == ["data_wait", "forward", "backward", "clip", "optimizer", "zero_grad", "sync"]


def test_cells_are_labelled_by_the_fields_that_vary():
    cells = [replace(CELL, backend=b, checkpointing=c).to_dict() for b in ("ddp", "zero2") for c in (False, True)]
    assert varying_fields(cells) == ("backend", "checkpointing")
    assert label(cells[1], varying_fields(cells)) == "backend=ddp checkpointing=yes"
    assert label(cells[0], ()) == "backend=ddp"


def test_a_cell_with_equal_launches_on_a_quiet_host_has_no_mark():
    records = [{**example_record(launch=launch), "host": quiet_state()} for launch in (1, 2)]
    assert summary_of(*records).marks == ()


def test_a_cell_of_one_planned_launch_is_marked_and_one_that_lacks_launches_is_incomplete_instead():
    (summary,) = summarize(example_run([CELL], measure=ONE_LAUNCH), [example_record()])
    assert summary.marks == ("one launch",)
    assert summary_of(example_record()).marks == ()


@pytest.mark.parametrize(("slower", "marks"), [(1.07, ()), (1.13, ("high spread",))])
def test_a_cell_whose_launches_differ_by_more_than_10_percent_is_marked(slower, marks):
    assert summary_of(example_record(launch=1), example_record(launch=2, step_s=0.2 * slower)).marks == marks


@pytest.mark.parametrize("number", [1, 2])
def test_one_launch_on_a_busy_host_marks_the_cell_and_the_state_of_the_latests_hosts_is_kept(number):
    states = {1: quiet_state(), 2: quiet_state()} | {number: busy_state()}
    summary = summary_of(*({**example_record(launch=launch), "host": state} for launch, state in states.items()))
    assert summary.marks == ("busy host",)
    assert list(summary.busy_reasons) == [number]
    assert summary.launches.host == states[2]


def test_the_state_of_the_hosts_is_that_of_the_latest_launch_that_ended_ok():
    busy, quiet = ({"host": state} for state in (busy_state(), quiet_state()))
    failed = example_record(launch=2, status="oom", error=OOM) | quiet
    assert summary_of(example_record(launch=1) | busy, failed).launches.host == busy["host"]
    mismatch = example_record(launch=1, status="mismatch", error=OOM) | busy | {"observed": example_record()["observed"]}
    summary = summary_of(mismatch, failed | {"observed": None})
    assert (summary.evidence["launch"], summary.launches.host) == (1, busy["host"]), "the failed one observed nothing"


def test_a_record_that_shares_values_with_the_first_one_has_its_own_where_they_differ():
    records = [example_record(launch=launch) for launch in (1, 2, 3)]
    records[1]["loss"], records[2]["added"] = [7.0], 1
    summary = summary_of(*records)
    left_out = {"step_time_s", "phases_s", "step_split_s", "throughput", "host"}
    kept = [{key: value for key, value in record.items() if key not in left_out} for record in records]
    assert [dict(record) for record in summary.records] == kept


def test_numbers_belong_to_the_launches_that_know_them():
    """Launches that failed or do not know a metric have none, wherever they stand among the others."""
    records = [example_record(launch=launch, step_s=0.1 * launch) for launch in (1, 2, 3, 5, 8)]
    for unknown in (records[0], records[2]):
        unknown["mfu"] = None
    for launch, known in ((2, records[1]), (5, records[3])):
        known["mfu"] = launch / 10
    records[4] |= {"status": "oom", "error": OOM, "mfu": 0.8}
    summary = summary_of(*records)
    assert summary.by_launch(metric_by_name("mfu")) == {2: 0.2, 5: 0.5}
    assert summary.values["mfu"].launches == 2
    steps = {record["launch"]: median(record["step_time_s"]["slowest"]) for record in records[:4]}
    assert summary.by_launch(metric_by_name("step_time_s")) == steps
    assert summary.by_launch(metric_by_name("hfu")) == {}
    assert summary.words(metric_by_name("status"), records[3:]) == "ok, oom"


def test_times_of_a_launch_are_told_apart_by_rank_phase_and_part():
    record = example_record(launch=4)
    per_rank = [[1.0, 2.0, 6.0], [2.0, 3.0, 7.0]]
    record["step_time_s"] = {"per_rank": per_rank, "slowest": per_rank[1]}
    record["phases_s"] = {"forward": {"per_rank": [[1.0, 1.0, 1.0], [1.5, 2.0, 2.5]]}, "backward": {"per_rank": per_rank}}
    parts = {part: {"per_rank": [[index] * 3, [10 + index] * 3]} for index, part in enumerate(STEP_PARTS)}
    times = summary_of(record | {"step_split_s": parts}).times[4]
    assert (times.mean_step_s, [*times.median_step_s]) == (4.0, [2.0, 3.0])
    assert times.phase_seconds() == {"forward": 2.0, "backward": 4.0}
    assert {part: [*seconds] for part, seconds in times.split().items()} == {
        part: [index, 10 + index] for index, part in enumerate(STEP_PARTS)
    }
    without = summary_of(record | {"step_split_s": None}).times[4]
    assert (times.has_split, without.has_split, without.split()) == (True, False, {})


def test_launches_with_the_same_phases_share_their_names():
    first, second, third = (example_record(launch=launch) for launch in (1, 2, 3))
    third["phases_s"] = {"other": first["phases_s"]["forward"]}
    times = summary_of(first, second, third).times
    assert times[1].phases is times[2].phases
    assert times[3].phases == ("other",)


def test_values_vary_that_a_file_writes_differently():
    """Python takes `1`, `1.0` and `true` for equal; cells of them have other ids."""
    for first, second in (
        (1, 1.0),
        (1, True),
        ([0.9, 1], [0.9, 1.0]),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"b": 1}),
        ([1], [1, 2]),
        (None, 0),
    ):
        assert varying_fields([{"field": first}, {"field": second}]) == ("field",)
        assert varying_fields([{"field": first}, {"field": first}]) == ()


def test_a_cell_of_which_one_rank_compiled_in_measured_steps_or_left_code_uncompiled_is_marked():
    ranks = [{"in_measured_steps": 0, "time_s": 3.0}, {"in_measured_steps": 0, "time_s": 1.0}]
    late = [ranks[0], ranks[1] | {"in_measured_steps": 1}]
    limited = [ranks[0], ranks[1] | {"limits_reached": [{"function": "forward", "reason": "a ninth shape"}]}]
    partly = ("partly compiled",)
    given_up = [ranks[0], ranks[1] | {"uncompiled": [{"function": "forward", "reason": "a loop"}]}]
    for per_rank, marks in ((ranks, ()), (late, ("recompiled",)), (limited, partly), (given_up, partly)):
        summary = summary_of(example_record(launch=1) | {"compilation": {"per_rank": per_rank}}, example_record(launch=2))
        assert summary.marks == marks
        assert summary.values["compile_time_s"].value == 3.0


def test_a_cell_whose_measured_steps_were_not_whole_is_marked():
    """A step that was skipped, or a backbone that was frozen, in the warm-up does not count."""
    record = example_record(launch=1)
    warmup, cell = record["warmup_steps"], record["cell"]
    for steps, marks in ((warmup, ()), (warmup + 1, ("partial steps",))):
        frozen = record | {"cell": cell | {"optim": cell["optim"] | {"freeze_backbone_steps": steps}}}
        assert summary_of(frozen, example_record(launch=2)).marks == marks
        skipped = record | {"skipped_steps": [steps - 1]}
        assert summary_of(skipped, example_record(launch=2)).marks == marks


def test_a_summary_of_some_launches_has_their_figures_and_their_status():
    records = [example_record(launch=number, step_s=step_s) for number, step_s in enumerate((0.1, 0.2, 0.3), 1)]
    records[0] |= {"status": "oom", "error": OOM}
    run = example_run([CELL], measure=asdict(replace(MEASURE, launches=5)))
    (summary,) = summarize(run, records)
    later, first = summary.of_launches(range(2, 100)), summary.of_launches((1,))
    assert (summary.status, later.status, first.status, summary.of_launches(()).status) == ("oom", "ok", "oom", "missing")
    assert (later.planned, first.planned, later.complete, later.error, first.error) == (4, 1, False, None, OOM)
    (second,) = (summary.of_launches((2,)).values["step_time_s"],)
    assert (second.value, second.launches) == (median(records[1]["step_time_s"]["slowest"]), 1)
    assert first.values["step_time_s"] is None
    diverged = replace(summary, status="diverged").of_launches((2, 3))
    assert (diverged.status, diverged.values["step_time_s"].launches) == ("diverged", 2)
