"""Facts that make each rule fire, with the place, the rank and the evidence of its finding."""

from __future__ import annotations

from typing import Any

from benchbox.observer.facts import Autocast, OpaqueOptimizer, PreparedByAccelerate, RankFacts, SteppedTensor
from tests.support.facts import (
    HALF_MOMENTS,
    MOMENTS,
    WEIGHT,
    average,
    buffer,
    flattened,
    half,
    live,
    loading,
    moments,
    rank,
    ranks,
    ranks_stepping,
    reduction,
    replicas,
    scaler,
    schedules,
    setup,
    single_dtypes,
    step_facts,
    tensor,
    unlinked,
)

A, B, C = "a.weight", "b.weight", "c.weight"
CHAIN = "AcceleratedOptimizer > AdamW"


def stepping(first: SteppedTensor, second: SteppedTensor) -> list[RankFacts]:
    """Return facts of two ranks of which the second steps one tensor more."""
    return [rank(0, contract=None, stepped=(first,)), rank(1, contract=None, stepped=(first, second))]


def on_rank_1(**changes: Any) -> list[RankFacts]:
    return [rank(0), rank(1, **changes)]


def of_both(*dtypes: str, elements: int = 2000) -> dict[str, Any]:
    """Return what the evidence of both tensors of `stepping` says of them."""
    return {"ranks": [0, 1], "dtypes": list(dtypes), "tensors": 2, "elements": elements, "names": [A, B]}


# Name of the case, beginning with the code: facts, place, rank and evidence.
CASES: dict[str, tuple[list[RankFacts], str, int, dict[str, Any]]] = {
    "BXP101": (
        stepping(
            half(A, elements=300, update_dot=1e-3),
            half(B, elements=50, update_dot=2e-3, dtype="float16", state={"momentum_buffer": "bfloat16"}),
        ),
        "AdamW",
        0,
        {
            "state": ["exp_avg in float32", "exp_avg_sq in float32", "step in float32", "momentum_buffer in bfloat16"],
            "edq": 0.4444,
            **of_both("bfloat16", "float16", elements=350),
        },
    ),
    "BXP101, by value": (
        stepping(
            tensor(A, bf16_valued_later={"weight": 1.0}, steps_before_later=12),
            tensor(B, bf16_valued_later={"weight": 1.0}, steps_before_later=14),
        ),
        "AdamW",
        0,
        {
            "share of moved elements that bfloat16 holds exactly": 1.0,
            "steps before they were compared": 14,
            **of_both("float32"),
        },
    ),
    "BXP102": (
        stepping(
            half(A, update_dot=1e-3, updates_lost=2000, steps=4, lr=2e-3), half(B, update_dot=0.0, updates_lost=3000, lr=1e-3)
        ),
        "AdamW",
        0,
        {
            "edq": 0.2222,
            "share of updates lost": 0.7778,
            "lr": [1e-3, 2e-3],
            "steps looked at": 4,
            "ranks": [0, 1],
            "names": [B, A],
            "edq of these": [0.0, 0.3333],
        },
    ),
    "BXP103": (
        stepping(half(A, pinned_steps=5, update_squared=3e-7), half(B, pinned_steps=8)),
        "AdamW",
        0,
        {"steps without a change": 8, "update, root mean square": 1e-3, **of_both("bfloat16")},
    ),
    "BXP104": (
        stepping(tensor(A, live_differs=0.25), tensor(B, live_differs=0.5)),
        "AdamW",
        0,
        {"share of elements that differ": 0.5, **of_both("float32")},
    ),
    "BXP105": (
        stepping(
            tensor(A, live_device="cuda:0"),
            tensor(B, live_device="cuda:1", device="cuda:1", state_devices={"exp_avg": "cuda:0"}),
        ),
        "AdamW",
        0,
        {
            "live": ["cuda:0", "cuda:1"],
            "stepped": ["cpu", "cuda:1"],
            "state": ["cpu", "cuda:0"],
            **of_both("float32"),
        },
    ),
    "BXP106": (
        stepping(half(A, lr=1e-3, weight_decay=0.1), half(B, lr=2e-3, weight_decay=0.3)),
        "AdamW",
        0,
        {"lr x weight decay": 6e-4, "least that arrives": 2.0**-9, **of_both("bfloat16")},
    ),
    "BXP107": (
        on_rank_1(
            averages=(
                average(),
                average(parameter=B, steps=5, lagging=100, stuck=0),
                average(parameter=C, written=False, lagging=900, stuck=900),
            )
        ),
        "EMA",
        1,
        {
            "share that no step changed, of elements that lag": 0.7778,
            "steps": 11,
            "dtypes": ["bfloat16"],
            "names": [WEIGHT, B],
        },
    ),
    "BXP201": (
        stepping(
            tensor(A, state=HALF_MOMENTS, second_moment_stalled=0.25),
            tensor(B, state=HALF_MOMENTS, betas=(0.9, 0.9995), second_moment_stalled=0.75),
        ),
        "AdamW",
        0,
        {
            "state": "exp_avg_sq in bfloat16",
            "beta2": [0.999, 0.9995],
            "share of v that cannot decay": 0.75,
            **of_both("float32"),
        },
    ),
    "BXP202": (
        stepping(
            tensor(A, **moments(exp_avg="bfloat16")),
            tensor(B, **moments(exp_avg="float16"), betas=(0.9, 0.98), dtype="bfloat16"),
        ),
        "AdamW",
        0,
        {
            "state": ["exp_avg in bfloat16", "exp_avg in float16"],
            "beta2": [0.98, 0.999],
            **of_both("bfloat16", "float32"),
        },
    ),
    "BXP203": (
        stepping(
            tensor(A, **moments(exp_avg_sq="float16"), second_moment_zero=0.25),
            tensor(B, **moments(exp_avg_sq="float16"), second_moment_zero=1e-5),
        ),
        "AdamW",
        0,
        {"share of v that is zero where the gradient is not": 0.25, **of_both("float32")},
    ),
    "BXP204": (
        stepping(tensor(A, **moments(exp_avg_sq="float16")), tensor(B, dtype="float16", state={}, eps=1e-9)),
        "AdamW",
        0,
        {"eps": [1e-9, 1e-8], "state": ["exp_avg_sq in float16"], **of_both("float16", "float32")},
    ),
    "BXP205": (
        stepping(tensor(A, **moments(step="float16")), tensor(B, **moments(step="bfloat16"))),
        "AdamW",
        0,
        {"step": ["float16", "bfloat16"], **of_both("float32")},
    ),
    "BXP205, ranks disagree": (
        on_rank_1(stepped=(tensor(step_count=8.0),)),
        "AdamW",
        0,
        {"steps": ["rank 0: 16", "rank 1: 8"], "names": [WEIGHT]},
    ),
    "BXP301": (
        on_rank_1(accumulated_in=("float32", "bfloat16"), steps=step_facts(micro_batches=lambda step: step)),
        "gradients",
        1,
        {"dtypes": ["bfloat16"], "ranks": [1], "micro-batches": 6},
    ),
    "BXP302": (
        on_rank_1(collectives=(reduction("bfloat16", elements=1234), reduction("float32"))),
        "gradients",
        1,
        {"collectives": ["reduce_scatter of 1,234 elements in bfloat16"], "world size": 2, "ranks": [1]},
    ),
    "BXP303": (
        on_rank_1(collectives=(reduction("bfloat16", elements=1234), reduction("float32", elements=9))),
        "FSDP1 reduce_dtype",
        1,
        {"configured": "float32", "observed": ["reduce_scatter of 1,234 elements in bfloat16"]},
    ),
    "BXP304": (
        on_rank_1(steps=step_facts(stepped_norm=lambda step: 0.5 + (step > 2))),
        "AdamW",
        1,
        {"reported": 2.0, "clipped to": 1.0, "norm the optimizer read": 1.5, "step": 3},
    ),
    "BXP304, scaled": (
        ranks(steps=step_facts(clip_scale=lambda step: 1024.0 if step > 1 else None)),
        "AdamW",
        0,
        {"reported": 2.0, "clipped to": 1.0, "norm the optimizer read": 0.5, "loss scale": 1024.0, "step": 2},
    ),
    "BXP305": (
        on_rank_1(contract=None, stepped=(tensor(A), tensor(B, gradient_dtype="float16"))),
        "gradients",
        1,
        {"float16": [B], "scaler": "none was seen"},
    ),
    "BXP305, all skipped": (on_rank_1(scaler=scaler(8, 8)), "GradScaler", 1, {"steps": 8, "skipped": 8}),
    "BXP401": (
        ranks(
            steps=step_facts(rates={"AdamW": (1e-3, 2e-3)}, schedule_rates=lambda step: {"LambdaLR": (0.5 / step,)}),
            schedules=schedules("LambdaLR", reaches=False),
        ),
        "LambdaLR",
        0,
        {
            "step": 6,
            "schedule says": [0.5 / 6],
            "stepped with": ["AdamW: 0.001, 0.002"],
            "bound to": "AdamW (another one than steps)",
        },
    ),
    "BXP401, zero": (
        ranks(steps=step_facts(12, rates={"SGD": (0.0,), "AdamW": (0.0,)}, schedule_rates={})),
        "AdamW, SGD",
        0,
        {"steps": 12, "schedules": ["LambdaLR"]},
    ),
    "BXP402": (
        ranks(prepared=PreparedByAccelerate(accumulation=4, wrapped=("SGD",), unknown=("AdamW", "Lion"))),
        "AdamW",
        0,
        {"optimizers": ["AdamW", "Lion"], "accumulation": 4, "prepared": ["SGD"]},
    ),
    "BXP403": (
        ranks(prepared=PreparedByAccelerate(accumulation=4, wrapped=("AdamW",), unknown=()), steps=step_facts(3)),
        "AdamW",
        0,
        {"micro-batches before each step": [1, 1, 1], "to be accumulated": 4},
    ),
    "BXP403, schedule": (
        ranks(steps=step_facts(schedule_steps=lambda step: {"LambdaLR": 3 * step + (step == 2)})),
        "LambdaLR",
        0,
        {"advances in a step": 3, "world size": 2},
    ),
    "BXP404": (
        ranks_stepping(
            unlinked(), parameters=(live(A, linked=False), live(B), live(C, linked=False, trainable=False, elements=9000))
        ),
        CHAIN,
        0,
        {"parameters": 1, "names": [A], "stepped": ["AdamW parameter 0"], "held, without a gradient": None},
    ),
    "BXP404, idle": (
        ranks(stepped=(), parameters=(live(A, linked=False), live(B, linked=False))),
        CHAIN,
        0,
        {"parameters": 2, "names": [A, B], "stepped": "nothing", "held, without a gradient": None},
    ),
    "BXP404, replaced": (
        ranks(parameters=(live(A, linked=False),), strangers=("AdamW parameter 2",)),
        CHAIN,
        0,
        {"parameters": 1, "names": [A], "stepped": None, "held, without a gradient": ["AdamW parameter 2"]},
    ),
    "BXP404, unmoved": (
        ranks(
            parameters=tuple(live(name, gradient="float32", unmoved_steps=steps) for name, steps in ((A, 12), (B, 15), (C, 9)))
        ),
        CHAIN,
        0,
        {"parameters": 2, "names": [A, B], "steps without a change": 15},
    ),
    "BXP404, checkpoint": (
        ranks(source="checkpoint", parameters=(live(A), live(B, linked=False), live(C, linked=False, trainable=False))),
        CHAIN,
        0,
        {"parameters": 1, "names": [B]},
    ),
    "BXP405": (
        ranks(setup=setup("ddp", "fsdp")),
        "Model",
        0,
        {"requested": "fsdp", "by": "accelerate", "observed": "ddp", "model": "Model"},
    ),
    "BXP406": (
        flattened(groups=((0.1, 0), (0.2, 0), (0.0, 2))),
        "AdamW",
        0,
        {
            "decay meant": "0.2 of a parameter group without parameters",
            "decay in force": 0.0,
            "names": [WEIGHT],
            "shapes": "2 dimensions, stepped as 1",
            "ranks": [0, 1],
        },
    ),
    "BXP406, default": (
        flattened(groups=((0.0, 2),), default_decay=0.1),
        "AdamW",
        0,
        {
            "decay meant": "0.1, the optimizer's default",
            "decay in force": 0.0,
            "names": [WEIGHT],
            "shapes": "2 dimensions, stepped as 1",
            "ranks": [0, 1],
        },
    ),
    "BXP407": (
        replicas((tensor(A), tensor(B)), (tensor(A, digest_after="beef"), tensor(B))),
        "AdamW",
        0,
        {"tensors that drift apart": 1, "tensors that stay equal": 1, "ranks that agree": ["0", "1"], "names": [A]},
    ),
    "BXP501": (
        stepping(*(tensor(name, bf16_valued={"weight": 1.0}, steps_before=steps) for name, steps in ((A, 7), (B, 9)))),
        "AdamW",
        0,
        {"share that bfloat16 holds exactly": 1.0, "steps before": 9, **of_both("float32")},
    ),
    "BXP502": (
        stepping(
            tensor(A, bf16_valued={"exp_avg": 1.0}, steps_before=7), tensor(B, bf16_valued={"exp_avg_sq": 1.0}, steps_before=9)
        ),
        "AdamW",
        0,
        {
            "state": ["exp_avg", "exp_avg_sq"],
            "share that bfloat16 holds exactly": 1.0,
            "steps before": 9,
            **of_both("float32"),
        },
    ),
    "BXP503": (
        loading(held=single_dtypes(MOMENTS | {"exp_avg": "bfloat16"}), before={"exp_avg": ("float32",), "max": ("float32",)}),
        "AdamW",
        0,
        {"state": ["exp_avg: float32 became bfloat16", "max: float32 became nothing"], "ranks": [0, 1]},
    ),
    "BXP504": (
        stepping(tensor(A, live_differs_first=0.25), tensor(B, live_differs_first=0.5)),
        "AdamW",
        0,
        {"share of elements that differ before the first step": 0.5, **of_both("float32")},
    ),
    "BXP601": (
        on_rank_1(products={"float32": 44, "bfloat16": 3}, autocast=Autocast(active=False)),
        "forward pass",
        1,
        {
            "requested": "bfloat16, by recipe bf16_master",
            "products": ["3 in bfloat16", "44 in float32"],
            "autocast": "inactive",
        },
    ),
    "BXP601, unrequested": (
        ranks(contract=None, setup=setup("ddp", None, "no")),
        "forward pass",
        0,
        {
            "requested": "none, by accelerate mixed_precision='no'",
            "products": ["40 in bfloat16", "4 in float32"],
            "autocast": "active, bfloat16",
        },
    ),
    "BXP602": (
        on_rank_1(
            buffers=(buffer("a.inv_freq", "bfloat16"), buffer("b.running_mean", "float16"), buffer("mask", "bfloat16")),
        ),
        "buffers",
        1,
        {"buffers": 2, "dtypes": ["bfloat16", "float16"], "names": ["a.inv_freq", "b.running_mean"]},
    ),
    "BXP603": (on_rank_1(default_dtype="bfloat16"), "torch.get_default_dtype()", 1, {"default": "bfloat16"}),
    "BXP604": (
        [rank(0, stepped=(half(A),)), rank(1, stepped=(half(A), tensor(B, state=HALF_MOMENTS)), contract=None)],
        "recipe bf16_master",
        0,
        {
            "differs": ["stepped: float32 declared, bfloat16 measured", "moments: float32 declared, bfloat16 measured"],
            "names": [A, B],
            "ranks": [0, 1],
        },
    ),
    "BXP604, unreadable": (
        on_rank_1(opaque=(OpaqueOptimizer(optimizer="Mystery", reason="unknown"),)),
        "Mystery",
        1,
        {"reason": "unknown", "ranks": [1]},
    ),
}
