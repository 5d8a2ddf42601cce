"""A ratio is given only for cells that differ in the named axis and in nothing else."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchbox.analysis.adam_state import adam_dtypes
from benchbox.analysis.comparability import why_incomparable
from benchbox.analysis.inference import ALPHA, Criteria
from benchbox.analysis.run_environments import environment_differences, environments_by_ranks, mixed_environment
from benchbox.analysis.summary import summarize
from benchbox.report.view import build_report
from benchbox.spec.cell import DataSpec
from tests.support.compared_cells import compared_cells
from tests.support.example_run import CELL, MEASURE, OOM, example_record, example_run, steady_records

FSDP, ZERO = replace(CELL, backend="fsdp1_full"), replace(CELL, backend="zero2")


def summaries(*records):
    cells = {record["cell_id"]: record["cell"] for record in records}
    return summarize(replace(example_run([CELL]), cells=cells), records)


def compare(*records, reference=None, axes=None):
    """The comparison of the first record's cell."""
    comparisons = compared_cells(summaries(*records), reference or {"backend": "zero2"}, axes)
    return comparisons[records[0]["cell_id"]]


def launches(cell, *steps_s):
    """Records of launches, one for each time of a step."""
    return [example_record(cell, launch, step_s=step_s) for launch, step_s in enumerate(steps_s, 1)]


QUIET = (0.98, 1.0, 1.01, 0.99, 1.02)  # times of five launches whose medians differ by chance


def test_cells_that_differ_in_the_backend_only_have_a_ratio_of_throughputs():
    comparison = compare(*launches(FSDP, *(0.3 * time for time in QUIET)), *launches(ZERO, *(0.2 * time for time in QUIET)))
    assert comparison.ratio == pytest.approx(0.2 / 0.3)
    assert (comparison.verdict, comparison.reason, comparison.more_launches) == ("regression", None, None)
    assert comparison.effect.low < 0.2 / 0.3 < comparison.effect.high < 1
    assert comparison.reference.cell["backend"] == "zero2"


def test_the_faster_cell_is_an_improvement():
    assert (
        compare(*launches(FSDP, *(0.2 * t for t in QUIET)), *launches(ZERO, *(0.3 * t for t in QUIET))).verdict == "improvement"
    )


def test_a_cell_whose_launches_ended_ok_without_a_throughput_has_no_ratio():
    """Records that something else wrote may be such: `verify` reports them."""
    unknown = [record | {"throughput": None} for record in launches(FSDP, *QUIET)]
    for records in ([*unknown, *launches(ZERO, *QUIET)], [*launches(ZERO, *QUIET), *unknown]):
        comparison = compare(*records, reference={"backend": "zero2" if records[0] in unknown else "fsdp1_full"})
        assert (comparison.verdict, comparison.reason) == ("incomparable", "fsdp1_full has no throughput")


def test_a_difference_that_chance_explains_is_inconclusive():
    """The ranges of two launches each do not overlap here, which chance alone brings about in one of three pairs."""
    comparison = compare(*launches(FSDP, 0.31, 0.32), *launches(ZERO, 0.2, 0.21))
    assert (comparison.verdict, comparison.more_launches) == ("inconclusive", 3)
    overlapping = compare(*launches(FSDP, 0.2, 0.3, 0.25, 0.22, 0.28), *launches(ZERO, 0.2, 0.21, 0.24, 0.2, 0.22))
    assert (overlapping.verdict, overlapping.more_launches) == ("inconclusive", None)


def test_the_cell_with_fewer_launches_says_how_many_more_are_needed():
    later = [record | {"launch": record["launch"] + 2} for record in launches(ZERO, 0.2, 0.21, 0.24, 0.2)]
    comparison = compare(*launches(FSDP, 0.31, 0.32), *later)
    assert (comparison.effect.launches, comparison.more_launches) == ((2, 4), 3)


def test_a_difference_below_two_percent_is_never_a_verdict_of_its_own():
    slower = compare(*steady_records(FSDP, step_s=0.202), *steady_records(ZERO, step_s=0.2))
    assert slower.effect.p < ALPHA
    assert slower.verdict == "neutral"


def test_more_pairs_need_more_launches():
    """One of five launches against five is rarer than 1% by chance; the best of four such pairs is not."""
    others = [replace(ZERO, backend=name) for name in ("ddp", "zero1", "zero3")]
    records = [record for cell in (FSDP, *others) for record in launches(cell, *(0.3 * time for time in QUIET))]
    comparisons = compared_cells(summaries(*records, *launches(ZERO, *(0.2 * time for time in QUIET))), {"backend": "zero2"})
    assert {(comparison.verdict, comparison.more_launches) for comparison in comparisons.values()} == {("inconclusive", 1)}


def test_a_cell_that_never_ran_is_missing():
    records = launches(ZERO, 0.2, 0.2)
    run = replace(example_run([CELL]), cells={FSDP.cell_id: FSDP.to_dict(), ZERO.cell_id: ZERO.to_dict()})
    comparison = compared_cells(summarize(run, records), {"backend": "zero2"})[FSDP.cell_id]
    assert (comparison.verdict, comparison.ratio) == ("missing", None)


def test_the_famous_comparison_is_refused():
    """FSDP with sdpa and checkpointing against ZeRO-2 without was once a headline."""
    fsdp = example_record(replace(FSDP, attention="sdpa", checkpointing=True))
    comparison = compare(fsdp, example_record(replace(ZERO, attention="eager")))
    assert comparison.ratio is None
    assert comparison.reason == "no cell differs from it in backend only"
    subject, reference = summaries(fsdp, example_record(replace(ZERO, attention="eager")))
    assert why_incomparable(subject, reference, ("backend",)) == "they also differ in attention, checkpointing"


OTHER_DATA = DataSpec(kind="synthetic")


def summarize_one(record, key, value):
    """The summary of a cell whose environment has a value under a key."""
    edit(record, ("environment", key), value)
    return summaries(record)[0]


def edit(record, path, value):
    *parents, leaf = path
    for key in parents:
        record = record[key]
    record[leaf] = value


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("observed", "attention_kernel"), "sdpa:math", "the attention kernel that ran: sdpa:math against sdpa:flash_cpu"),
        (("observed", "checkpointed_modules"), 4, "checkpointed modules: yes against no"),
        (("steps",), 3, "measured steps: 3 against 4"),
        (("environment", "machine"), "another", "machine: another against Example CPU, 2 cores"),
        (("environment", "policy_sha256"), "f", "policy_sha256: f against 000000000000"),
        (("environment", "benchbox_sha256"), "f", "benchbox_sha256: f against null"),
        (("environment", "policy_sha256"), "f" * 64, "policy_sha256: ffffffffffff against 000000000000"),
    ],
)
def test_observations_must_agree_too(path, value, reason):
    record = example_record(FSDP)
    edit(record, path, value)
    comparison = compare(record, example_record(ZERO))
    assert comparison.ratio is None
    assert comparison.reason == f"they also differ in {reason}"


@pytest.mark.parametrize(("key", "field", "value"), [("policy_sha256", "policy", "pi0"), ("data_sha256", "data", OTHER_DATA)])
def test_sources_and_data_may_differ_only_along_the_axis_that_names_them(key, field, value):
    subject = summarize_one(example_record(replace(CELL, **{field: value})), key, "f" * 64)
    reference = summarize_one(example_record(CELL), key, "0" * 64)
    assert why_incomparable(subject, reference, (field,)) is None
    same_cell = summarize_one(example_record(CELL), key, "f" * 64)
    assert why_incomparable(same_cell, reference, ()) == f"they also differ in {key}: ffffffffffff against 000000000000"


def test_a_run_of_cells_with_several_data_does_not_say_which_it_has():
    records = [example_record(CELL), example_record(replace(CELL, data=OTHER_DATA))]
    for record, digest in zip(records, ("0" * 64, "f" * 64), strict=True):
        edit(record, ("environment", "data_sha256"), digest)
    assert environments_by_ranks(records[:1])[CELL.world_size]["data_sha256"] == "0" * 64
    assert environments_by_ranks(records)[CELL.world_size]["data_sha256"] is None


def test_adam_states_of_another_dtype_are_not_comparable():
    record = example_record(FSDP)
    for entry in record["precision"]["census"]:
        entry["dtype"] = "bfloat16"
    assert adam_dtypes(record) == ("bfloat16",)
    assert compare(record, example_record(ZERO)).reason == "they also differ in Adam state: bfloat16 against float32"


def test_a_cell_that_failed_is_in_no_ratio():
    comparison = compare(example_record(FSDP), example_record(ZERO, status="oom", error=OOM))
    assert (comparison.ratio, comparison.reason) == (None, "zero2 is oom")


def test_a_reference_of_two_axes_compares_nothing_unless_the_matrix_moves_them_together():
    subject = replace(FSDP, attention="sdpa", checkpointing=True)
    counterpart = replace(FSDP, attention="eager", checkpointing=False)
    reference = {"attention": "eager", "checkpointing": False}
    free = {"attention": ["eager", "sdpa"], "checkpointing": [False, True]}
    zipped = {"kernels": [{"attention": "eager", "checkpointing": False}, {"attention": "sdpa", "checkpointing": True}]}
    records = (example_record(subject), example_record(counterpart, step_s=0.4))
    refused = compare(*records, reference=reference, axes=free)
    assert (refused.ratio, refused.reason) == (None, "the reference differs in 2 axes at once: attention, checkpointing")
    assert compare(*records, reference=reference, axes=zipped).ratio == pytest.approx(2)


def test_the_reference_is_not_compared_with_itself_and_no_reference_compares_nothing():
    comparisons = compared_cells(summaries(example_record(FSDP), example_record(ZERO)), {"backend": "zero2"})
    assert list(comparisons) == [FSDP.cell_id]
    assert compared_cells(summaries(example_record(FSDP)), {}) == {}


def test_a_variable_that_is_null_is_as_one_that_an_older_record_does_not_list():
    old, new = launches(FSDP, 0.3, 0.3), launches(ZERO, 0.2, 0.2)
    for record in old:
        record["environment"]["variables"] = {"OMP_NUM_THREADS": "1"}
    for record in new:
        record["environment"]["variables"] = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": None}
    assert compare(*old, *new).reason is None
    for record in new:
        record["environment"]["variables"]["NCCL_ALGO"] = "Ring"
    assert compare(*old, *new).reason.startswith("they also differ in variables: ")


def test_tf32_and_determinism_must_agree_where_both_sides_recorded_them():
    old, new = launches(FSDP, 0.3, 0.3), launches(ZERO, 0.2, 0.2)
    for record in new:
        record["environment"]["numerics"] = {"cudnn_tf32": True}
    assert compare(*old, *new).reason is None
    for record in old:
        record["environment"]["numerics"] = {"cudnn_tf32": False}
    assert compare(*old, *new).reason == "they also differ in numerics: cudnn_tf32=no against cudnn_tf32=yes"


def test_processors_of_one_name_and_other_instructions_are_not_compared():
    """A hypervisor may call all of a maker's alike. Records that do not know their instructions are compared as before."""
    old, new = launches(FSDP, 0.3, 0.3), launches(ZERO, 0.2, 0.2)
    for record in new:
        record["environment"]["cpu_capability"] = "AVX2"
    assert compare(*old, *new).reason is None
    for record in old:
        record["environment"]["cpu_capability"] = "AVX512"
    assert compare(*old, *new).reason == "they also differ in cpu_capability: AVX512 against AVX2"
    ours, theirs = (records[-1]["environment"] for records in (new, old))
    assert environment_differences(ours, theirs) == {"cpu_capability": "cpu_capability AVX2 against AVX512"}


@pytest.mark.parametrize("mixed", [FSDP, ZERO])
def test_launches_of_one_cell_that_differ_in_their_environment_are_in_no_ratio(mixed):
    """A run that was resumed under other variables: the latest launches of both cells agree, and the others do not."""
    records = [*launches(FSDP, *[0.3] * 6), *launches(ZERO, *[0.2] * 6)]
    assert compare(*records).verdict == "regression"
    for record in records:
        is_earlier = record["cell_id"] == mixed.cell_id and record["launch"] < 6
        record["environment"] = record["environment"] | {"threads": 1 if is_earlier else 2}
    comparison = compare(*records)
    assert (comparison.verdict, comparison.ratio) == ("incomparable", None)
    assert comparison.reason == f"launches of {mixed.backend} differ in threads"


def test_cells_that_were_measured_one_after_the_other_are_in_no_ratio():
    """One of them was measured again on another day: what changed on the machine in between would be a verdict."""
    friday = steady_records(FSDP, step_s=0.3, started="2026-01-05")
    comparison = compare(*friday, *steady_records(ZERO, step_s=0.2, started="2026-01-01"))
    assert (comparison.verdict, comparison.ratio) == ("incomparable", None)
    assert comparison.reason.startswith("most of their launches were not measured in turns")
    in_turns = steady_records(ZERO, step_s=0.2, started="2026-01-05")
    assert compare(*friday, *in_turns).verdict == "regression"


def on_two_days(cell, days, *, step_s, slower=1.05):
    """Records of launches on the first day or later ones, when the machine is slower; a digit for each launch."""
    by_day = {day: steady_records(cell, step_s=step_s * (1 if day == "1" else slower), launches=len(days)) for day in days}
    return [
        by_day[day][launch - 1] | {"started_at": f"2026-01-0{day}T00:{launch:02}:0{cell is ZERO:d}+00:00"}
        for launch, day in enumerate(days, 1)
    ]


def test_launches_without_a_counterpart_are_in_no_ratio():
    """One cell was launched more often on a slower day: its first launches are those that the other cell has too."""
    comparison = compare(*on_two_days(FSDP, "11111", step_s=0.2), *on_two_days(ZERO, "1" * 5 + "2" * 15, step_s=0.2))
    assert comparison.effect.launches == (5, 5)
    assert comparison.verdict == "neutral"


def test_a_single_launch_of_another_day_is_in_no_ratio():
    comparison = compare(*on_two_days(FSDP, "2", step_s=0.2), *on_two_days(ZERO, "1111111", step_s=0.2))
    assert (comparison.verdict, comparison.ratio) == ("incomparable", None)
    same_day = compare(*on_two_days(FSDP, "1", step_s=0.2), *on_two_days(ZERO, "1111111", step_s=0.2))
    assert (same_day.effect.launches, same_day.verdict) == ((1, 1), "inconclusive")


def test_equal_numbers_on_different_days_are_no_rounds():
    """A cell whose launches were repeated on a slower day, but for the first."""
    comparison = compare(*on_two_days(FSDP, "1" + "2" * 9, step_s=0.2), *on_two_days(ZERO, "1" * 10, step_s=0.2))
    assert comparison.verdict == "incomparable"
    assert comparison.reason == "most of their launches were not measured in turns: --fresh measures both again"


def test_a_launch_that_was_repeated_on_another_day_is_exchanged_with_none():
    """Eleven of twelve rounds are left, and four of five."""
    days = "1" * 4 + "2" + "1" * 7
    comparison = compare(*on_two_days(FSDP, days, step_s=0.2, slower=1.5), *on_two_days(ZERO, "1" * 12, step_s=0.2))
    assert (comparison.effect.method, comparison.effect.launches) == ("exchanged rounds", (11, 11))
    assert comparison.verdict == "neutral"
    few = compare(*on_two_days(FSDP, "11211", step_s=0.2), *on_two_days(ZERO, "11111", step_s=0.2))
    assert (few.effect.launches, few.verdict, few.more_launches) == ((4, 4), "inconclusive", 1)


def test_launches_of_three_days_are_compared_on_the_day_that_both_have():
    """Seven launches of both, then seven of each on other days, of which one was slower."""
    alone = on_two_days(FSDP, "1" * 7 + "2" * 7, step_s=0.2, slower=1.0), on_two_days(ZERO, "1" * 7 + "3" * 7, step_s=0.2)
    comparison = compare(*(record for side in alone for record in side))
    assert (comparison.effect.launches, comparison.verdict) == ((7, 7), "neutral")


def test_cells_without_a_common_launch_have_a_ratio_that_nothing_settles():
    comparison = compare(*launches(FSDP, 0.2)[:1], *launches(ZERO, 0.2, 0.2)[1:])
    assert (comparison.effect.launches, comparison.verdict) == ((1, 1), "inconclusive")


def test_equality_of_several_pairs_needs_as_many_launches_as_a_difference():
    others = [replace(ZERO, backend=name) for name in ("ddp", "zero1", "zero3")]
    records = [record for cell in (FSDP, *others, ZERO) for record in steady_records(cell, step_s=0.2)]
    comparisons = compared_cells(summaries(*records), {"backend": "zero2"})
    assert {(comparison.verdict, comparison.more_launches) for comparison in comparisons.values()} == {("inconclusive", 1)}


def test_a_verdict_of_an_earlier_look_is_kept():
    records = [*launches(FSDP, 0.31, 0.32), *launches(ZERO, 0.2, 0.21)]
    for reference, verdict in ((ZERO, "regression"), (CELL, "inconclusive")):  # the latter settled another pair of this cell
        criteria = Criteria(settled={f"{FSDP.cell_id}/{reference.cell_id}": "regression"})
        comparisons = compared_cells(summaries(*records), {"backend": "zero2"}, criteria=criteria)
        assert comparisons[FSDP.cell_id].verdict == verdict


def test_a_reference_of_two_axes_beside_a_search_of_the_batch_compares_nothing():
    axes = {"batch": {"search": "max"}, "backend": ["fsdp1_full", "zero2"], "attention": ["sdpa", "eager"]}
    reference = {"backend": "zero2", "attention": "sdpa"}
    comparison = compare(*launches(FSDP, 0.3), *launches(ZERO, 0.2), reference=reference, axes=axes)
    assert comparison.reason == "the reference differs in 2 axes at once: backend, attention"


@pytest.mark.parametrize("key", ["launcher", "accelerate", "deepspeed", "driver", "cuda"])
def test_cells_of_another_launcher_library_or_driver_are_in_no_ratio(key):
    subject, reference = example_record(FSDP), example_record(ZERO)
    subject["environment"][key], reference["environment"][key] = "1", "2"
    assert compare(subject, reference).reason == f"they also differ in {key}: 1 against 2"
    assert environment_differences({key: "1"}, {key: "2"}) == {key: f"{key} 1 against 2"}


@pytest.mark.parametrize("key", ["machine", "benchbox", "accelerate", "deepspeed", "driver", "cuda", "nccl", "cpu_capability"])
def test_launches_of_a_run_that_differ_in_a_version_are_mixed(key):
    records = [example_record(launch=launch) for launch in (1, 2)]
    for record in records:
        record["environment"][key] = str(record["launch"])
    assert mixed_environment(records) == {key: f"launches of the run differ in {key}: 1, 2"}


def in_environments(cells, key):
    """Records of a launch of each cell, each with another value of a key of the environment."""
    records = [example_record(cell, launch) for launch, cell in enumerate(cells, 1)]
    for record in records:
        record["environment"][key] = str(record["launch"])
    return records


@pytest.mark.parametrize(
    ("key", "may_differ", "may_not"),
    [
        ("launcher", (FSDP, replace(FSDP, world_size=1)), (FSDP, ZERO)),  # all ranks are started alike, as in `run --only`
        ("threads", (FSDP, replace(FSDP, world_size=1)), (FSDP, ZERO)),
        ("numerics", (FSDP, ZERO), (FSDP, FSDP)),  # a policy may set them
        ("policy_sha256", (FSDP, replace(FSDP, policy="another")), (FSDP, FSDP)),
    ],
)
def test_launches_of_a_run_are_mixed_where_nothing_of_their_cells_explains_another_environment(key, may_differ, may_not):
    """A run that was resumed otherwise keeps the launches that it has, and is compared with no other run."""
    assert mixed_environment(in_environments(may_differ, key)) == {}
    assert mixed_environment(in_environments(may_not, key)) == {key: f"launches of the run differ in {key}: 1, 2"}


@pytest.mark.parametrize(("axis", "is_compared"), [("world_size", True), ("batch", False)])
def test_fewer_ranks_are_compared_with_the_threads_that_they_then_have(axis, is_compared):
    """Along another axis a difference of threads is one of the set-up."""
    subject, reference = (FSDP, replace(FSDP, world_size=1)) if axis == "world_size" else (FSDP, replace(FSDP, batch=1))
    records = []
    for cell, threads in ((subject, 1), (reference, 2)):
        for record in steady_records(cell, step_s=0.2):
            variables = {"OMP_NUM_THREADS": str(threads), "NCCL_DEBUG": "INFO"}
            environment = record["environment"] | {"threads": threads, "variables": variables}
            records.append(record | {"environment": environment})
    comparison = compare(*records, reference={axis: 1})
    assert (comparison.ratio is not None) == is_compared
    run = replace(example_run([subject, reference], measure=asdict(MEASURE) | {"launches": 5}), reference={axis: 1})
    headline = build_report(run, records).headline
    assert ("in the threads that a rank then has" in headline.compared) == is_compared
    if not is_compared:
        assert comparison.reason == "they also differ in threads: 1 against 2"
