"""The reports of comparisons."""

from __future__ import annotations

from tests.peers.policies import PEERS, batch_of, build_peer, padding_of
from tests.peers.report import render_gpu_report, render_report


def side(name, precision, step_s, **values):
    turn = {
        "step_s": [step_s],
        "phases_s": {"forward": [0.1], "backward": [0.2], "clip": [0.01], "optimizer": [0.02]},
        "losses": [0.5],
        "cuda_bytes": 3 * 2**30,
        "rss": 2**20,
    }
    return {
        "name": name,
        "variant": "eager",
        "precision": precision,
        "wave": "one",
        "losses": [1.5],
        "turns": [turn] * 5,
    } | values


def test_a_side_that_failed_is_a_row_with_its_error_and_the_others_are_compared():
    sides = [
        side("benchbox", "bf16_pure", 0.3),
        side("benchbox", "bf16_master", 0.4, wave="two", losses=[], turns=[], error="ended: out of memory"),
        side("lerobot 0.6.1", "bfloat16", 0.5, losses=[1.5015]),
    ]
    result = {"policy": "pi05", "size": "full", "parameters": 3.3e9, "batch": 8, "precision": "bfloat16", "sides": sides}
    run = {"command": "python -m tests.peers.gpu", "device": "NVIDIA H200", "torch": "2.11.0", "transformers": "5.17.0"}
    lines = render_gpu_report({**run, "note": "It was warm.", "results": [result]}).splitlines()
    rows = {line.split(" | ")[0]: line for line in lines if line.startswith("| ")}
    assert rows["| benchbox, eager, bf16_pure"].endswith("| 3.00 GiB | 1.5000 -> 0.5000 | 0.60 (0.60 to 0.60) |")
    assert "out of memory" in rows["| benchbox, eager, bf16_master"]
    assert rows["| side"].endswith("| over lerobot 0.6.1, eager, bfloat16 |")
    assert "It was warm." in lines
    assert "Losses of the first step differ by 1.0e-03 at most." in lines


def test_kernels_alone_have_a_ratio_and_train_nothing():
    kernels = side("kernels alone", "", 0.25, variant="sdpa")
    kernels["turns"][0]["phases_s"] = {"forward": [0.05], "backward": [0.1]}
    sides = [side("benchbox", "", 0.3), kernels, side("lerobot 0.6.1", "", 0.5)]
    for entry in sides:
        del entry["precision"], entry["turns"][0]["cuda_bytes"]
    result = {"policy": "pi0", "size": "tiny", "parameters": 1e6, "sides": [entry | {"torch": "2.13"} for entry in sides]}
    rows = {line.split(" | ")[0]: line for line in render_report([result]).splitlines() if line.startswith("| ")}
    assert (
        rows["| kernels alone, sdpa"]
        == "| kernels alone, sdpa | 250.0 ms | 50.0 ms | 100.0 ms |  | 1 MiB |  | 0.50 (0.50 to 0.50) |"
    )
    assert rows["| side"].endswith("| loss | over lerobot 0.6.1, eager |")


def test_the_share_of_padding_stands_above_the_sides_that_leave_it_out():
    """The last of three cameras of pi0 tiny is missing, and its prompts fill their field."""
    peer = PEERS["pi0-tiny"]
    policy = build_peer(peer, "sdpa")
    padding = padding_of(policy, batch_of(policy, peer))
    sides = [side("benchbox", "", 0.3, variant="sdpa, padding left out"), side("lerobot 0.6.1", "", 0.5, variant="eager")]
    sides = [{key: value for key, value in entry.items() if key != "precision"} | {"torch": "2.13"} for entry in sides]
    report = render_report([{"policy": "pi0", "size": "tiny", "parameters": 1e6, "padding": padding, "sides": sides}])
    assert 0.2 < padding["flops"] < 0.5
    assert f"1 of 3 cameras and 0 of 48 prompt tokens are padding, which takes {padding['flops']:.0%} of the FLOPs" in report
    assert "| benchbox, sdpa, padding left out |" in report
