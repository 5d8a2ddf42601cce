"""Cells that ask for the same training train alike within rounding, or they are diverged and lose their ratio."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchbox.analysis.equivalence import relative_difference
from benchbox.analysis.gate import gate, verdict_of
from benchbox.analysis.regression import BaselineLookup
from benchbox.analysis.summary import summarize
from benchbox.registry.recipes import JUDGED_STEPS, recipe_by_name
from benchbox.report.equivalence import equivalence_panel
from benchbox.spec.cell import OptimSpec
from benchbox.store.run import RunStore
from tests.support.compared_cells import compared_cells
from tests.support.example_run import CELL, example_record, example_run

REPORTS = Path(__file__).parents[3] / "reports"
PUBLISHED = sorted(path.parent.name for path in REPORTS.glob("*/run.json"))
SINGLE = replace(CELL, backend="single", world_size=1, batch=4)
TOLERANCE = recipe_by_name(CELL.recipe).tolerance


def judged(*records, **changes):
    """Return the summaries of these records by backend, under a plan of their cells."""
    cells = {record["cell_id"]: record["cell"] for record in records}
    run = replace(example_run([CELL], **{"reference": {"backend": "single"}} | changes), cells=cells)
    summaries = summarize(run, records)
    return run, {summary.cell["backend"]: summary for summary in summaries}


def verdicts(*records, **changes):
    _, summaries = judged(*records, **changes)
    return {backend: summary.equivalence.verdict for backend, summary in summaries.items()}


def scaled(record, quantity, factor, first=0):
    values = [value * (factor if step >= first else 1) for step, value in enumerate(record[quantity])]
    return record | {quantity: values}


def published(name):
    store = RunStore(REPORTS / name)
    run, records = store.run(), list(store.records())
    return run, records, summarize(run, records)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_published_cell_is_diverged(name):
    """Real launches of every policy on every backend: an alarm here would be false."""
    _, _, summaries = published(name)
    assert [summary.equivalence.reason for summary in summaries if summary.equivalence.verdict == "diverged"] == []


def test_nearly_all_cells_of_the_published_runs_are_compared():
    counts = Counter(summary.equivalence.verdict for name in PUBLISHED for summary in published(name)[2])
    assert counts["equivalent"] > 700, counts
    assert counts["not compared"] < 20, counts


def test_tolerances_are_a_few_times_what_rounding_was_measured_to_do():
    """Nearer to it, chance would raise alarms; further away, faults would be missed."""
    largest = Counter()
    for name in PUBLISHED:
        for summary in published(name)[2]:
            for quantity, difference in (summary.equivalence.differences or {}).items():
                products = "float32" if summary.cell["recipe"] == "fp32" else "bfloat16"
                for step, value in enumerate(difference.values[:JUDGED_STEPS]):
                    key = products, quantity, step == 0
                    largest[key] = max(largest[key], value)
    for (products, quantity, is_first), value in largest.items():
        tolerance = recipe_by_name("fp32" if products == "float32" else "bf16_master").tolerance
        margin = tolerance.at(quantity, 0 if is_first else 1) / value
        assert 4 < margin < (10 if products == "bfloat16" else 200), (products, quantity, is_first, margin)


@pytest.mark.parametrize("factor", [2.0, 0.5, 2**0.5])
@pytest.mark.parametrize("name", ["backends", "fsdp_vs_zero2", "policies"])
def test_gradients_of_a_wrong_scale_in_a_published_run_are_found_in_every_cell(name, factor):
    """Adam and clipping hide the scale of gradients from the loss: only the norm shows it."""
    run, records, summaries = published(name)
    equivalent = [summary for summary in summaries if summary.equivalence.verdict == "equivalent"]
    assert equivalent
    for summary in equivalent:
        wrong = [scaled(r, "grad_norm", factor) if r["cell_id"] == summary.cell_id else r for r in records]
        after = {other.cell_id: other.status for other in summarize(run, wrong)}
        assert after[summary.cell_id] == "diverged"
        assert set(after.values()) - {"oom"} == {"ok", "diverged"}, "batches beyond memory stay what they are"
        assert list(after.values()).count("diverged") == 1


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_one_launch_that_trains_differently_makes_its_cell_diverged(wrong):
    launches = [example_record(CELL, number) for number in (1, 2, 3)]
    launches[wrong - 1] = scaled(launches[wrong - 1], "grad_norm", 2)
    assert verdicts(example_record(SINGLE), *launches) == {"single": "reference", "ddp": "diverged"}


def test_cells_that_split_the_same_samples_differently_are_compared():
    accumulated = replace(CELL, batch=1, accumulation=2, attention="eager", checkpointing=True, backend="fsdp2")
    records = [example_record(cell) for cell in (CELL, SINGLE, accumulated)]
    assert verdicts(*records) == {"ddp": "equivalent", "single": "reference", "fsdp2": "equivalent"}


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"batch": 4}, {"recipe": "fp32"}, {"cams": 4}, {"order": "sequential"}, {"optim": OptimSpec(lr=1.0)}],
    ids=str,
)
def test_cells_of_different_trainings_are_not_compared(changes):
    _, summaries = judged(example_record(replace(CELL, **changes)), example_record(SINGLE))
    for summary in summaries.values():
        assert summary.equivalence.verdict == "not compared"
        assert summary.equivalence.reason == "no other cell of the matrix asks for the same training"
        assert summary.status == "ok"


def test_a_diverged_cell_loses_its_ratio_and_fails_the_gate():
    run, summaries = judged(
        *(example_record(SINGLE, launch) for launch in (1, 2)),
        *(scaled(example_record(CELL, launch), "grad_norm", 2.0) for launch in (1, 2)),
    )
    assert (summaries["ddp"].status, summaries["single"].status) == ("diverged", "ok")
    reason = "its gradient norm differs by 100% of the reference's in step 0"
    assert summaries["ddp"].divergence.startswith(reason)
    cells = list(summaries.values())
    axes = {"setup": [{"backend": cell.cell["backend"], "world_size": 0, "batch": 0} for cell in cells]}
    comparisons = compared_cells(cells, {"backend": "single", "world_size": 1, "batch": 4}, axes)
    (comparison,) = comparisons.values()
    assert comparison.verdict == "incomparable"
    assert comparison.reason.startswith(f"ddp world_size=2 batch=2 is diverged: {reason}")
    rows = gate(run, cells, BaselineLookup(None, None))
    assert [(row.actual, row.verdict) for row in rows] == [("ok", "ok"), ("diverged", "breach")]
    assert rows[1].note.startswith(reason)
    assert verdict_of(rows) == "breach"


@pytest.mark.parametrize("quantity", ["loss", "grad_norm"])
@pytest.mark.parametrize("step", [0, 3])
def test_the_tolerance_of_the_recipe_decides(quantity, step):
    base, limit = example_record(SINGLE), TOLERANCE.at(quantity, step)
    for factor, verdict in ((0.99, "equivalent"), (1.01, "diverged")):
        other = scaled(example_record(CELL), quantity, 1 + factor * limit, first=step)
        if step == 0:  # later steps have a wider one
            other = other | {quantity: [other[quantity][0], *base[quantity][1:]]}
        assert verdicts(base, other)["ddp"] == verdict
        _, summaries = judged(base, other)
        assert summaries["ddp"].equivalence.differences[quantity].step >= step


def test_a_step_without_a_number_on_one_side_is_a_difference():
    base, other = example_record(SINGLE), example_record(CELL)
    gap = [other["loss"][0], None, *other["loss"][2:]]
    assert verdicts(base, other | {"loss": gap})["ddp"] == "diverged"
    assert verdicts(base | {"loss": gap}, other | {"loss": gap})["ddp"] == "equivalent"


def test_a_further_launch_of_the_reference_is_compared_with_its_first():
    base, again = (example_record(SINGLE, launch) for launch in (1, 2))
    assert verdicts(base, again) == {"single": "reference"}
    assert verdicts(base, scaled(again, "loss", 1.5)) == {"single": "diverged"}


def test_steps_beyond_those_that_rounding_was_measured_over_are_not_judged():
    steps = JUDGED_STEPS + 5
    base, other = (example_record(cell) | {"loss": [2.0] * steps, "grad_norm": [1.0] * steps} for cell in (SINGLE, CELL))
    assert verdicts(base, scaled(other, "loss", 1.5, first=JUDGED_STEPS))["ddp"] == "equivalent"
    assert verdicts(base, scaled(other, "loss", 1.5, first=JUDGED_STEPS - 1))["ddp"] == "diverged"


def test_a_policy_that_does_not_train_is_not_compared():
    records = [example_record(cell) | {"loss": [0.0] * 5, "grad_norm": [0.0] * 5} for cell in (SINGLE, CELL)]
    _, summaries = judged(*records)
    assert summaries["ddp"].equivalence.reason == "every gradient of the reference is zero: nothing trains"


def test_a_reference_that_does_not_train_beside_a_cell_that_does_is_no_excuse():
    """Whichever of them is wrong, the ratio of the two means nothing."""
    base = example_record(SINGLE) | {"grad_norm": [0.0] * 5}
    _, summaries = judged(base, example_record(CELL))
    assert summaries["ddp"].status == "diverged"
    assert summaries["ddp"].divergence == "every gradient of the reference is zero, and its own are not"
    panel = equivalence_panel(list(summaries.values()), ("backend",))
    (row,) = (row for row in panel.rows if row.verdict == "diverged")
    assert row.reason == summaries["ddp"].divergence


def test_a_cell_that_does_not_train_beside_a_reference_that_does_is_diverged():
    other = example_record(CELL) | {"grad_norm": [0.0] * 5}
    assert verdicts(example_record(SINGLE), other)["ddp"] == "diverged"


@pytest.mark.parametrize("backend", ["single", "ddp"])
@pytest.mark.parametrize(("quantity", "text"), [("loss", "loss"), ("grad_norm", "gradient norm")])
def test_a_cell_is_not_equivalent_in_what_is_unknown(backend, quantity, text):
    records = [example_record(cell) | ({quantity: None} if cell.backend == backend else {}) for cell in (SINGLE, CELL)]
    equivalence = judged(*records)[1]["ddp"].equivalence
    assert (equivalence.verdict, equivalence.reason) == ("not compared", f"the {text} of a launch is unknown")


def test_optimizer_states_of_other_dtypes_are_no_rounding():
    """bf16_naive steps masters where the backend keeps them, and the parameters themselves elsewhere."""
    _, _, summaries = published("precision_ab")
    naive = {
        s.cell["backend"]: s.equivalence for s in summaries if s.cell["recipe"] == "bf16_naive" and s.cell["size"] == "tiny"
    }
    assert naive["zero2"].verdict == "not compared"
    assert naive["zero2"].reason == "it differs in Adam state: float32 against bfloat16"
    assert naive["ddp"].verdict == "equivalent"


@pytest.mark.parametrize(
    ("device", "tf32", "verdict"),
    [("cpu", True, "diverged"), ("NVIDIA H200", False, "diverged"), ("NVIDIA H200", True, "equivalent")],
)
def test_float32_products_in_tf32_have_the_tolerance_of_that_format(device, tf32, verdict):
    records = [example_record(replace(cell, recipe="fp32")) for cell in (SINGLE, CELL)]
    for record in records:
        record["observed"]["device"] = [device]
        record["environment"]["numerics"] = {"matmul_tf32": tf32, "cudnn_tf32": False}
    assert verdicts(records[0], scaled(records[1], "loss", 1.001))["ddp"] == verdict


@pytest.mark.parametrize(
    ("value", "expected", "difference"),
    [
        (1.1, 1.0, 0.1),
        (0.9, 1.0, 0.1),
        (-1.0, -1.0, 0.0),
        (-1.0, -2.0, 0.5),
        (0.1, 0.0, 0.2),
        (None, 1.0, float("inf")),
        (None, None, None),
    ],
)
def test_relative_differences(value, expected, difference):
    """A value near zero is measured against the smallest scale."""
    assert relative_difference(value, expected, 0.5) == (None if difference is None else pytest.approx(difference))


def test_a_recipe_that_declares_no_tolerance_is_not_judged(monkeypatch):
    recipe = replace(recipe_by_name(CELL.recipe), tolerance=None)
    monkeypatch.setattr("benchbox.analysis.equivalence.recipes", lambda: {CELL.recipe: recipe})
    _, summaries = judged(example_record(SINGLE), scaled(example_record(CELL), "loss", 2))
    assert {summary.equivalence.verdict for summary in summaries.values()} == {"not compared"}
    assert summaries["ddp"].equivalence.reason == "its recipe declares no tolerance"


@pytest.mark.parametrize(
    ("key", "name"), [("policy_sha256", "the sources of the policy"), ("data_sha256", "the metadata of the data")]
)
def test_cells_of_two_versions_of_a_policy_or_of_data_are_not_compared(key, name):
    reference, edited = example_record(SINGLE), scaled(example_record(CELL), "grad_norm", 2)
    for record, digest in ((reference, "0" * 64), (edited, "1" * 64)):
        record["environment"] = record["environment"] | {key: digest}
    _, summaries = judged(reference, edited)
    assert (summaries["ddp"].status, summaries["ddp"].equivalence.verdict) == ("ok", "not compared")
    assert summaries["ddp"].equivalence.reason == f"it differs in {name}"


@pytest.mark.parametrize(
    "changes", [{"compile": "blocks"}, {"padding": "longest"}, {"backend": "hsdp", "shard_size": 2}], ids=str
)
def test_compilation_padding_and_the_size_of_shards_change_no_training(changes):
    cell = replace(CELL, **changes)
    assert verdicts(example_record(SINGLE), example_record(cell)) == {"single": "reference", cell.backend: "equivalent"}
