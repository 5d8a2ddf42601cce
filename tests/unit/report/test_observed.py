"""Settings of backends, call sites of attention kernels and sizes of micro-batches in the observed section of a report."""

from __future__ import annotations

from typing import Any

from benchbox.report.view import build_report
from tests.support.example_run import CELL, example_record, example_run
from tests.support.host_states import quiet_state


def observed_of(**observed: Any) -> dict[str, str]:
    """Build a report of one cell whose launches observed these values, and return its observations by name."""
    records: list[Any] = [example_record(CELL, launch=launch) for launch in (1, 2)]
    for record in records:
        record["observed"] |= observed
    return {item.name: item.observed for item in build_report(example_run([CELL]), records).observed[0].observations}


def test_settings_of_the_backend_are_shown_by_name() -> None:
    settings = {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": False, "reduce_bucket_size": 500, "comm_hook": None}
    assert observed_of(settings=settings)["backend settings"] == (
        "backward_prefetch=BACKWARD_PRE, forward_prefetch=no, reduce_bucket_size=500, comm_hook=null"
    )


def test_a_record_without_settings_has_no_line_for_them() -> None:
    assert "backend settings" not in observed_of()


def test_several_attention_kernels_are_shown_with_the_modules_that_called_them() -> None:
    sites = {"dit.layers.*": ["sdpa:flash_cpu"], "model.layers.*": ["eager"]}
    assert observed_of(attention_kernel="sdpa:flash_cpu+eager", attention_sites=sites)["attention"] == (
        "sdpa:flash_cpu+eager (sdpa:flash_cpu in dit.layers.*; eager in model.layers.*)"
    )
    one = {"model.layers.*": ["sdpa:flash_cpu"]}
    assert observed_of(attention_kernel="sdpa:flash_cpu", attention_sites=one)["attention"] == "sdpa:flash_cpu"


def test_sizes_of_micro_batches_are_shown_over_all_ranks_beside_those_of_the_spec() -> None:
    ranks: list[Any] = [
        {
            "cameras": {"smallest": smallest, "largest": 2, "spec": 4},
            "prompt": {"smallest": 32, "largest": longest, "spec": 48},
            "fast": {"smallest": 16, "largest": 16, "spec": 16},
        }
        for smallest, longest in ((2, 48), (1, 32))
    ]
    assert observed_of(micro_batch_sizes=ranks)["micro-batches"] == (
        "cameras 1 to 2 of 4, prompt 32 to 48 of 48 tokens, fast 16 of 16 tokens"
    )
    reason = "the policy generates its batches, and no spec says how large they are"
    unknown = observed_of(micro_batch_sizes=[None, None], micro_batch_sizes_reason=reason)
    assert unknown["micro-batches"] == reason
    assert "micro-batches" not in observed_of(), "a record of an earlier version has no line for them"


def test_the_padding_is_what_was_requested_of_micro_batches() -> None:
    record: Any = example_record(CELL)
    record["observed"]["micro_batch_sizes"] = [{"cameras": {"smallest": 4, "largest": 4, "spec": 4}}] * 2
    (line,) = [
        item for item in build_report(example_run([CELL]), [record]).observed[0].observations if item.name == "micro-batches"
    ]
    assert (line.requested, line.observed) == ("padding full", "cameras 4 of 4")


def observations(**changes: Any) -> dict[str, list[str]]:
    """Return the observed values by name of a cell of which a launch has these values in its record."""
    record: Any = example_record(CELL) | changes
    lines: dict[str, list[str]] = {}
    for item in build_report(example_run([CELL]), [record]).observed[0].observations:
        lines.setdefault(item.name, []).append(item.observed)
    return lines


def test_compilation_is_that_of_the_rank_that_took_longest_with_its_breaks_recompilations_and_limits() -> None:
    rank = {"graphs": 1, "time_s": 2.0, "from_cache": 0, "not_from_cache": 0, "in_measured_steps": 0}
    rank |= {"graph_breaks": [], "recompilations": []}
    longest = rank | {"graphs": 3, "time_s": 20.0, "from_cache": 1, "not_from_cache": 3, "in_measured_steps": 2}
    longest["graph_breaks"] = [{"where": "policy.py:40", "reason": "a print", "count": 2}]
    longest["recompilations"] = [{"function": "forward", "reason": "another shape"}]
    longest["limits_reached"] = [{"function": "forward", "reason": "a ninth shape"}]
    longest["uncompiled"] = [{"function": "attend", "reason": "a loop (line 7)"}]
    assert observations(compilation={"per_rank": [rank, longest]})["torch.compile"] == [
        "3 graphs, 20.0 s, 1 of their 4 passes found in the cache, 2 compilations in measured steps",
        "graph break at policy.py:40: a print (2)",
        "forward was compiled again: another shape",
        "limit reached: forward runs uncompiled where no variant fits: a ninth shape",
        "attend ran uncompiled: a loop (line 7)",
    ]
    assert observations(compilation={"per_rank": [rank]})["torch.compile"] == ["1 graph, 2.00 s"]


def test_compile_time_with_an_empty_cache_stands_beside_that_with_graphs_from_it() -> None:
    """The other observations are of the latest launch, and the figure of the cell is the median."""
    counts = {"graphs": 2, "in_measured_steps": 0, "graph_breaks": [], "recompilations": []}
    records: list[Any] = []
    for launch, (time_s, found) in enumerate(((50.0, 0), (12.0, 4), (14.0, 4)), start=1):
        rank = counts | {"time_s": time_s, "from_cache": found, "not_from_cache": 4 - found}
        records.append(example_record(CELL, launch) | {"compilation": {"per_rank": [rank | {"time_s": 1.0}, rank]}})
    observed = build_report(example_run([CELL]), records).observed[0].observations
    assert [item.observed for item in observed if item.name == "torch.compile"] == [
        "2 graphs, 14.0 s, 4 of their 4 passes found in the cache",
        "by launches: 13.0 s from the cache (2), 50.0 s with an empty cache (1)",
    ]


def test_data_say_what_was_kept_held_out_and_drawn_of_every_dataset() -> None:
    dataset = {"dataset": "a", "source": "real", "control_mode": "joint", "fps": 30.0, "frames": 1000, "training_frames": 900}
    dataset |= {"training_episodes": 9, "keep": None, "kept_frames": 950, "kept_episodes": 10, "drawn": 30, "share": 0.8}
    dataset |= {"validation_frames": 0, "validation_episodes": 0}
    other = dataset | {"dataset": "b", "keep": "k.json", "validation_frames": 50, "validation_episodes": 1, "drawn": 10}
    first, second = observations(data={"mode": "policy", "datasets": [dataset, other | {"share": 0.2}]})["data"]
    beginning = "900 of 1,000 frames at 30 frames/s in 9 episodes, source real, control mode joint"
    assert first == f"a: {beginning}, 75.0% of the drawn samples, 80.0% as configured"
    assert second == (
        f"b: {beginning}, 950 frames in 10 episodes kept, 50 frames in 1 episodes for validation, "
        "25.0% of the drawn samples, 20.0% as configured"
    )
    assert observations(data={"mode": "action", "datasets": [dataset]})["data"] == ["mode action", f"a: {beginning}"]


def test_what_holds_a_gpu_back_is_shown() -> None:
    """An H200 at its power limit, and a GPU of which NVML tells nothing."""
    unknown = dict.fromkeys(("sm_clock_mhz", "power_w", "temperature_c", "throttle_reasons", "other_utilisation"))
    known = unknown | {"sm_clock_mhz": {"start": 1875, "end": 1725}, "power_w": {"start": 689.4, "end": None}}
    devices = [{"rank": 0, **known, "throttle_reasons": ["SwPowerCap"]}, {"rank": 1, **unknown}]
    devices.append({"rank": 2, **unknown, "throttle_reasons": []})
    assert observations(host=quiet_state() | {"devices": devices})["host"][-3:] == [
        "GPU of rank 0: SM clock 1875 to 1725 MHz, power 689 to - W, temperature -, held back by SwPowerCap",
        "GPU of rank 1: SM clock -, power -, temperature -",
        "GPU of rank 2: SM clock -, power -, temperature -, not held back",
    ]


def test_energy_of_the_devices_and_collectives_and_flops_that_are_unknown_are_shown() -> None:
    shown = observations(host=quiet_state() | {"energy_j_per_sample": 12.5}, collectives=None, flops=None)
    assert shown["host"][-1] == "energy of the devices: 12.5 J per sample"
    assert (shown["collectives in a step"], shown["FLOPs of a step"]) == (["-"], ["-"])
    assert observations(collectives={})["collectives in a step"] == ["none"]
