"""The profile of a cell as text, from made-up times of two ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchbox.analysis.profile import build_profile
from benchbox.report.profile import OPERATORS, render_profile
from tests.support.host_states import rank_host
from tests.support.peaks import made_up_peaks

GROUP = "2 cpu ranks with 1 thread"


def rank_profile(rank: int, step_s: float, **changes: Any) -> Any:
    """Return the profile of a rank: half of its time is backward, and the optimizer moves 500 MB."""
    product = {"tower": "vision", "dtype": "bfloat16"}
    values = {
        "rank": rank,
        "device": "cpu",
        "threads": 1,
        "machine": "Example CPU",
        "torch": "2.13.0",
        "step_s": [step_s] * 2,
        "profiled_step_s": [2 * step_s] * 2,
        "phases_s": {"forward": [0.3 * step_s] * 2, "backward": [0.5 * step_s] * 2, "optimizer": [0.1 * step_s] * 2},
        "fused_phases": {"clip": "clipped in the optimizer's step"},
        "bytes": {"optimizer": {"read": 3 * 10**8, "written": 2 * 10**8, "collectives": 0}},
        "products": [
            product | {"phase": "forward", "shape": "large", "flops": 6 * 10**9},
            product | {"phase": "backward", "shape": "thin", "flops": 6 * 10**9},
        ],
        "flops_reason": None,
        "bytes_reasons": {},
        "compilation": None,
        "tower_s": {"forward": {"vision": 0.3, "": 0.1}, "backward": {"vision": 0.6}},
        "operators": [{"name": f"aten::op{number}", "calls": 4, "self_s": 0.1 - number / 200} for number in range(17)],
        "recomputed_flops": 0,
        "host": rank_host(rank),
    }
    return values | changes


def rows_of(profile: Any) -> dict[str, list[str]]:
    """Return the words of each line of the text by its first word, the first such line."""
    rows: dict[str, list[str]] = {}
    for line in render_profile(profile).splitlines():
        words = line.split()
        rows.setdefault(words[0] if words else "", words[1:])
    return rows


def test_the_slowest_rank_has_its_phases_towers_and_longest_operations():
    profile = build_profile("c", {}, [rank_profile(0, 0.1), rank_profile(1, 0.2)], {GROUP: made_up_peaks()})
    rows, text = rows_of(profile), render_profile(profile)
    assert text.startswith("rank 1, the slowest: a step takes 200 ms on Example CPU\n")
    assert rows["forward"] == ["60.0", "ms", "30.0%", "100", "GFLOP/s", "25%", "25%", "-", "-", "compute"]
    assert rows["backward"] == ["100", "ms", "50.0%", "60.0", "GFLOP/s", "15%", "60%", "-", "-", "compute"]
    assert rows["optimizer"] == ["20.0", "ms", "10.0%", "-", "-", "-", "23.3", "GiB/s", "-", "-"]
    assert rows["clip:"] == ["clipped", "in", "the", "optimizer's", "step"]
    assert rows["vision"] == ["forward", "45.0", "ms", "75.0%", "6.00", "GFLOP", "133", "GFLOP/s", "33%"]
    assert rows["none"] == ["forward", "15.0", "ms", "25.0%", "-", "-", "-"]
    assert "in 2 profiled steps; a profiled step takes 2.00 times as long\n" in text
    assert rows["aten::op1"] == ["4", "95.0", "ms", "11.9%"]
    assert text.count("aten::op") == OPERATORS
    assert "forward runs at 25% and backward at 15% of what this device can do in products\n" in text
    assert not any(word in text for word in ("uncertain", "busy host", "unknown"))


def test_of_a_compiled_cell_what_is_fused_is_unknown_with_a_reason_and_doubts_are_warnings():
    unseen = {"read": None, "written": None, "collectives": 0}
    compilation = {"in_measured_steps": 2, "limits_reached": [{"function": "forward (policy.py:4)", "reason": "a ninth shape"}]}
    compilation["uncompiled"] = [{"function": "attend (policy.py:9)", "reason": "a loop"}]
    values: Any = {
        "bytes": {"forward": unseen, "optimizer": {"read": 3 * 10**8, "written": 2 * 10**8, "collectives": 0}},
        "bytes_reasons": {"forward": "fused operations are not seen"},
        "tower_s": {"forward": {"vision": 0.3, "unknown": 0.1}},
    }
    ranks = [rank_profile(0, 0.2, **values), rank_profile(1, 0.1, compilation=compilation, late_compilations=1)]
    profile = build_profile("c", {}, ranks, {GROUP: made_up_peaks()})
    forward, optimizer = (next(row for row in profile["phases"] if row["phase"] == name) for name in ("forward", "optimizer"))
    assert [forward[key] for key in ("bytes", "bytes_per_s", "of_memory", "bound")] == [None] * 4
    assert forward["of_peak"] == 0.25
    assert forward["bytes_reason"] == "fused operations are not seen"
    assert optimizer["bytes"] == 5 * 10**8
    text = render_profile(profile)
    assert "forward: fused operations are not seen\n" in text
    assert "unknown: torch.compile has made one function of several towers\n" in text
    assert "warning: torch.compile compiled something in timed steps; " in text
    assert (
        "warning: torch.compile reached its limit of variants of forward (policy.py:4): further ones ran uncompiled\n" in text
    )
    assert "warning: torch.compile compiled something in the steps under the profiler: " in text
    assert "warning: torch.compile gave up attend (policy.py:9), which ran uncompiled\n" in text
    assert "warning: torch.compile" not in render_profile(build_profile("c", {}, ranks[:1], {}))


def test_what_the_times_and_the_shares_cannot_be_trusted_for_is_said():
    busy = rank_profile(0, 0.2, host=rank_host(busy_s=9.8), flops_reason="a product of another package was not seen")
    ranks = [busy, rank_profile(1, 0.1)]
    peaks = made_up_peaks()
    peaks.matmul["bfloat16"]["large"]["spread"] = 0.4
    text = render_profile(build_profile("c", {}, ranks, {GROUP: peaks}))
    assert "forward: a product of another package was not seen\n" in text
    assert (
        "warning: the peaks are uncertain: repetitions differ in bfloat16 large by 40%; run benchbox doctor --peaks again"
        in text
    )
    unused = made_up_peaks()
    unused.matmul["float32"]["large"]["spread"] = 0.4
    assert "the peaks are uncertain" not in render_profile(build_profile("c", {}, ranks, {GROUP: unused})), "no products in it"
    assert "warning: busy host while steps were timed: other processes used 18% of the CPU time: times are too long\n" in text
    assert "are those of torch" not in text
    older = render_profile(build_profile("c", {}, ranks, {GROUP: replace(peaks, torch="2.12.0")}))
    assert "warning: the peaks are those of torch 2.12.0, and the steps of torch 2.13.0: benchbox doctor --peaks" in older
    unmeasured = render_profile(build_profile("c", {}, ranks, {}))
    assert f"shares of the peaks are unknown: no peaks were measured for {GROUP}; benchbox doctor --peaks" in unmeasured


def test_the_bytes_of_an_optimizer_whose_kernels_are_not_seen_are_unknown_with_a_reason():
    """Also where a phase has no operation at all: it is none that moves nothing."""
    ranks = [rank_profile(rank, 0.2, bytes={}, bytes_reasons={"optimizer": "kernels of its own"}) for rank in (0, 1)]
    profile = build_profile("c", {}, ranks, {GROUP: made_up_peaks()})
    rows = {row["phase"]: row for row in profile["phases"]}
    assert (rows["optimizer"]["bytes"], rows["optimizer"]["of_memory"], rows["forward"]["bytes"]) == (None, None, 0)
    text = render_profile(profile)
    assert "optimizer: kernels of its own\n" in text
    assert "the optimizer at" not in text


def test_collectives_are_shown_beside_the_measured_rate_of_an_all_reduce():
    """At 2 GB/s, 30 MB of two phases take 15 ms of a step of 200 ms."""
    sizes = {
        name: {"read": 0, "written": 0, "collectives": size} for name, size in (("backward", 2 * 10**7), ("optimizer", 10**7))
    }
    peaks = replace(made_up_peaks(), all_reduce={"per_s": 2e9, "spread": 0.0, "repetitions": 5, "size": [1]})
    ranks = [rank_profile(rank, 0.2, bytes=sizes) for rank in (0, 1)]
    text = render_profile(build_profile("c", {}, ranks, {GROUP: peaks}))
    expected = (
        "collectives of a step carry 28.6 MiB: at the 1.86 GiB/s that an all-reduce reaches, 15.0 ms or 7.5% of the step; "
    )
    assert expected in text
    assert "kernels" not in text
    on_gpus = render_profile(build_profile("c", {}, [rank_profile(rank, 0.2, collective_s=0.05) for rank in (0, 1)], {}))
    assert "and their kernels run for 25.0 ms, which no tower has\n" in on_gpus
    without = render_profile(build_profile("c", {}, ranks, {}))
    assert "collectives of a step carry 28.6 MiB\n" in without
    alone = build_profile("c", {}, ranks[:1], {})
    assert alone["communication"] is None
    assert "collectives" not in render_profile(alone)
