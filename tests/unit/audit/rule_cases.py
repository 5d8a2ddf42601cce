"""For every rule: facts that it must fire on, how severely, and the nearest ones that it must not fire on."""

from __future__ import annotations

from facts_made import (
    FEW,
    HALF_MOMENTS,
    KAHAN,
    MOMENTS,
    NORM,
    STOCHASTIC,
    WEIGHT,
    buffer,
    courses,
    edq,
    flattened,
    half,
    live,
    loading,
    moments,
    rank,
    ranks,
    reduction,
    scaler,
    schedules,
    setup,
    stepping,
    tensor,
    told,
)

from benchbox.measure.witness.facts import (
    Autocast,
    Configured,
    Contract,
    Opaque,
    Prepared,
    RankFacts,
)

Facts = list[RankFacts]

FIRES: dict[str, list[tuple[str, str, Facts]]] = {
    "BXP101": [
        ("live bfloat16", "error", stepping(half())),
        ("bfloat16 masters", "error", stepping(tensor(dtype="bfloat16"))),
        ("float16", "error", stepping(half(dtype="float16"))),
        ("an adapter", "warning", stepping(half("layer.lora_A.weight", update_dot=1e-3))),
        ("an adapter whose updates arrive", "info", stepping(half("layer.lora_A.weight"))),
        ("on one rank", "error", [rank(0, contract=None), rank(1, contract=None, stepped=(half(),))]),
    ],
    "BXP102": [("most are lost", "error", edq(0.1)), ("some are lost", "warning", edq(0.7))],
    "BXP103": [
        ("a bfloat16 norm", "error", stepping(half(NORM, pinned_steps=6))),
        ("a float32 weight that something puts back", "error", stepping(tensor(pinned_steps=6))),
    ],
    "BXP104": [("one element in a thousand", "error", stepping(tensor(live_differs=0.001)))],
    "BXP105": [
        ("a master", "error", stepping(tensor(device="cpu", live_device="cuda:0", state_devices={}))),
        ("a moment", "error", stepping(tensor(state_devices={"exp_avg": "cuda:0"}))),
    ],
    "BXP106": [
        ("bfloat16", "warning", stepping(half())),
        ("a Kahan sum, which weight decay has no part in", "warning", stepping(half(**KAHAN))),
    ],
    "BXP201": [
        ("0.999", "error", stepping(tensor(state=HALF_MOMENTS))),
        ("exactly 1 - 2^-9", "error", stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 1 - 2.0**-9)))),
        ("0.998", "warning", stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.998)))),
    ],
    "BXP202": [
        ("float32 weights at a low beta2", "info", stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.95)))),
        ("16-bit weights at a low beta2", "warning", stepping(half(state=HALF_MOMENTS, betas=(0.9, 0.95)))),
        ("the first moment only", "warning", stepping(tensor(**moments(exp_avg="bfloat16")))),
        ("momentum", "warning", stepping(tensor(state={"momentum_buffer": "bfloat16"}, betas=None))),
        ("float32 weights at 0.995", "info", stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.995)))),
    ],
    "BXP203": [("a share of v", "error", stepping(tensor(**moments(exp_avg_sq="float16"), second_moment_zero=0.01)))],
    "BXP204": [
        ("1e-8 in float16", "error", stepping(tensor(**moments(exp_avg_sq="float16")))),
        ("1e-42 in bfloat16", "error", stepping(tensor(state=HALF_MOMENTS, eps=1e-42))),
        ("1e-46 in float32", "error", stepping(tensor(eps=1e-46))),
    ],
    "BXP205": [
        ("bfloat16", "error", stepping(tensor(**moments(step="bfloat16")))),
        ("ranks disagree", "error", [rank(0), rank(1, stepped=(tensor(step_count=8.0),))]),
    ],
    "BXP301": [("bfloat16", "warning", ranks(accumulated_in=("bfloat16",), steps=courses(micro_batches=4)))],
    "BXP302": [
        ("two ranks", "info", ranks(collectives=(reduction("bfloat16"),), reduction=None)),
        ("64 ranks", "warning", ranks(collectives=(reduction("bfloat16"),), reduction=None, world_size=64)),
    ],
    "BXP303": [("bfloat16 for float32", "error", ranks(collectives=(reduction("bfloat16"),)))],
    "BXP304": [
        ("larger than the limit", "error", ranks(steps=courses(stepped_norm=1.5))),
        ("no gradient was clipped", "error", ranks(steps=courses(reported_norm=0.0))),
    ],
    "BXP305": [
        ("float16 gradients", "error", stepping(tensor(gradient_dtype="float16"))),
        ("autocast", "error", ranks(autocast=Autocast(active=True, dtype="float16"))),
        ("all steps skipped", "error", ranks(scaler=scaler(8, 8))),
        ("all steps skipped, so none was seen", "error", ranks(scaler=scaler(8, 8), stepped=(), missing={"stepped": "none"})),
    ],
    "BXP401": [
        ("a rate that stays", "error", ranks(steps=courses(rates={"AdamW": (1e-3,)}))),
        (
            "of an optimizer that was thrown away",
            "error",
            ranks(steps=courses(rates={"AdamW": (1e-3,)}), schedules=schedules("LambdaLR", reaches=False)),
        ),
        (
            "one of two optimizers",
            "error",
            ranks(
                steps=courses(
                    rates=lambda step: {"AdamW": (1e-3,), "SGD": (0.1 / step,)},
                    schedule_rates=lambda step: {"LambdaLR": (1e-3 / step,), "LambdaLR 2": (0.1 / step,)},
                ),
                schedules=schedules("LambdaLR", "LambdaLR 2"),
            ),
        ),
    ],
    "BXP402": [
        ("a duck-typed wrapper", "warning", ranks(prepared=Prepared(accumulation=1, wrapped=(), unknown=("AdamW",)))),
        ("under accumulation", "error", ranks(prepared=Prepared(accumulation=4, wrapped=(), unknown=("AdamW",)))),
    ],
    "BXP403": [
        ("a schedule for each micro-batch", "error", ranks(steps=courses(schedule_steps=lambda step: {"LambdaLR": 4 * step}))),
        ("a schedule for each process", "info", ranks(steps=courses(schedule_steps=lambda step: {"LambdaLR": 2 * step}))),
        (
            "an optimizer for each micro-batch",
            "error",
            ranks(prepared=Prepared(accumulation=4, wrapped=("AdamW",), unknown=())),
        ),
        ("two steps for one forward pass", "error", ranks(steps=courses(micro_batches=lambda step: step % 2))),
    ],
    "BXP404": [
        (
            "others",
            "error",
            stepping(tensor(live_dtype=None, live_device=None), parameters=(live(linked=False),)),
        ),
        ("none", "error", stepping(parameters=(live(linked=False),))),
    ],
    "BXP405": [
        ("fsdp became ddp", "error", ranks(setup=setup("ddp", "fsdp"))),
        ("zero became ddp", "error", ranks(setup=setup("ddp", "zero"))),
    ],
    "BXP406": [
        ("a group without parameters", "error", flattened(groups=((0.1, 0), (0.0, 2)))),
        ("a default that groups overrule", "error", flattened(groups=((0.0, 2),), default_decay=0.1)),
    ],
    "BXP501": [
        ("masters", "error", stepping(tensor(bf16_valued={"weight": 1.0}))),
        ("float32 weights", "error", stepping(tensor(live=True, live_dtype="float32", bf16_valued={"weight": 1.0}))),
        (
            "after two steps, of 64 elements",
            "error",
            stepping(tensor(bf16_valued={"weight": 1.0}, steps_before=2, elements=64)),
        ),
    ],
    "BXP502": [
        ("the first moment", "warning", stepping(tensor(bf16_valued={"weight": 0.0, "exp_avg": 1.0}))),
        (
            "the second moment, without momentum",
            "warning",
            stepping(tensor(bf16_valued={"exp_avg_sq": 1.0}, betas=(0.0, 0.999))),
        ),
    ],
    "BXP503": [
        ("to bfloat16", "error", loading(held=told(HALF_MOMENTS))),
        ("to nothing", "error", loading(given={}, held={}, before=told(MOMENTS))),
    ],
    "BXP504": [("before the first step", "error", stepping(tensor(live_differs_first=1.0)))],
    "BXP601": [
        ("inactive", "warning", ranks(products={"float32": 44}, autocast=Autocast(active=False))),
        ("accelerate's word", "warning", ranks(products={"float32": 44}, contract=None)),
        ("unrequested", "warning", ranks(contract=None, setup=setup("ddp", None, "no"))),
        (
            "where float32 was declared",
            "warning",
            ranks(contract=Contract(source="recipe fp32", compute="float32"), products={"float32": 44}),
        ),
    ],
    "BXP602": [
        ("rotary", "warning", ranks(buffers=(buffer("layers.0.rotary.inv_freq", "bfloat16"),))),
        ("running", "warning", ranks(buffers=(buffer("bn.running_var", "float16"),))),
    ],
    "BXP603": [("bfloat16", "warning", ranks(default_dtype="bfloat16"))],
    "BXP604": [
        ("stepped", "error", ranks(stepped=(half(),))),
        ("moments", "error", ranks(stepped=(tensor(state=HALF_MOMENTS),))),
        ("storage", "error", ranks(contract=Contract(source="a flag", storage="float32"))),
        ("unreadable", "unknown", ranks(opaque=(Opaque(optimizer="Mystery", reason="its arithmetic is unknown"),))),
        (
            "the witness fell",
            "unknown",
            [rank(0, stepped=(), problems=("begin: KeyError",), missing={"stepped": "the witness failed"})],
        ),
    ],
}

CLEAN: dict[str, list[tuple[str, Facts]]] = {
    "BXP101": [("stochastic rounding", stepping(half(**STOCHASTIC))), ("a rank without elements", stepping(half(elements=0)))],
    "BXP102": [
        ("nearly all arrive", edq(0.95)),
        ("a live weight that has masters", stepping(tensor(update_dot=0.0))),
        ("compensated", edq(0.1, **KAHAN)),
        ("one noisy tensor among good ones", stepping(half(), half(NORM, update_dot=1e-6, update_squared=1e-5))),
    ],
    "BXP103": [
        ("a scalar", stepping(half(elements=1, shape=(), pinned_steps=6))),
        ("a float32 weight at the start of a warm-up", stepping(tensor(pinned_steps=6, update_squared=3e-15))),
        ("three steps are enough", ranks(steps=courses(3))),
    ],
    "BXP104": [
        ("masters in the optimizer's state", stepping(half(live_differs=0.1, compensation="state master_param"))),
        ("no masters", stepping(half(live_differs=None))),
    ],
    "BXP105": [("declared", stepping(tensor(live_device="cuda:0", offload="DeepSpeedZeroOptimizer offloads its state")))],
    "BXP106": [
        ("a large one", stepping(half(lr=0.1))),
        ("float32", stepping(tensor(lr=1e-6))),
        ("none", stepping(half(weight_decay=0.0))),
        ("rounded stochastically", stepping(half(**STOCHASTIC))),
    ],
    "BXP201": [
        ("0.995", stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.995)))),
        ("float32", stepping(tensor())),
        ("exactly 1 - 2^-8", stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 1 - 2.0**-8)))),
    ],
    "BXP202": [
        ("by design", stepping(half(state=HALF_MOMENTS, betas=(0.9, 0.95), **STOCHASTIC))),
        ("those of BXP201", stepping(tensor(state=HALF_MOMENTS))),
        ("a 16-bit step counter is BXP205's", stepping(tensor(**moments(step="bfloat16")))),
    ],
    "BXP203": [
        ("none is", stepping(tensor(**moments(exp_avg_sq="float16")))),
        ("float32", stepping(tensor(second_moment_zero=0.1))),
    ],
    "BXP204": [
        ("bfloat16 holds 1e-8", stepping(tensor(state=HALF_MOMENTS))),
        ("float16 holds 1e-7", stepping(tensor(**moments(exp_avg_sq="float16"), eps=1e-7))),
        ("no eps at all", stepping(tensor(eps=0.0))),
        ("1e-40 in bfloat16", stepping(tensor(state=HALF_MOMENTS, eps=1e-40))),
        ("1e-44 in float32", stepping(tensor(eps=1e-44))),
    ],
    "BXP205": [
        ("a rank that was ended earlier", [rank(0), rank(1, stepped=(tensor(step_count=8.0),), steps=courses(3))]),
        ("one that holds no part of it", [rank(0), rank(1, stepped=(tensor(step_count=8.0, elements=0),))]),
    ],
    "BXP301": [("float32", ranks(steps=courses(micro_batches=4)))],
    "BXP302": [
        ("a flag in 16 bits", ranks(collectives=(reduction("float32"), reduction("bfloat16", elements=2)))),
        (
            "parameters are gathered in 16 bits",
            ranks(collectives=(reduction("float32"), reduction("bfloat16", operation="all_gather"))),
        ),
    ],
    "BXP303": [
        ("activations beside", ranks(collectives=(reduction("float32"), reduction("bfloat16", operation="all_reduce")))),
        ("as configured", ranks(collectives=(reduction("bfloat16"),), reduction=Configured(source="a hook", dtype="bfloat16"))),
        (
            "parameters gathered, and flags counted",
            ranks(
                collectives=(
                    reduction("float32", elements=8),
                    reduction("bfloat16", operation="all_gather"),
                    reduction("int64", operation="all_reduce"),
                )
            ),
        ),
        ("nobody says", ranks(reduction=None, collectives=())),
    ],
    "BXP304": [
        ("rounding", ranks(steps=courses(stepped_norm=1.005))),
        ("bfloat16 gradients", stepping(half(), steps=courses(stepped_norm=1.02))),
        ("no gradient at all", ranks(steps=courses(reported_norm=0.0, stepped_norm=0.0))),
    ],
    "BXP305": [
        ("scaled", stepping(tensor(gradient_dtype="float16"), scaler=scaler(8, 1))),
        ("a frozen float16 model looks on", ranks(products={"float16": 10, "bfloat16": 40})),
        ("nobody could have seen a scaler", stepping(half(dtype="float16"), missing={"scaler": "a checkpoint"})),
        ("one step is not every", ranks(scaler=scaler(1, 1))),
    ],
    "BXP401": [
        ("one group of several", ranks(steps=courses(schedule_rates=lambda step: {"LambdaLR": (1e-3 / step, 5e-4 / step)}))),
        (
            "left over from an optimizer that was thrown away",
            ranks(
                steps=courses(schedule_rates=lambda step: {"LambdaLR": (1e-3 / step,), "LambdaLR 2": (1e-3 / step**2,)}),
                schedules=(*schedules("LambdaLR"), *schedules("LambdaLR 2", reaches=False)),
            ),
        ),
        (
            "left over from an earlier stage, standing still",
            ranks(
                steps=courses(rates={"AdamW": (1e-4,)}, schedule_rates={"LambdaLR": (1e-3,)}),
                schedules=schedules("LambdaLR", reaches=False),
            ),
        ),
        (
            "a schedule of epochs, and rates set by hand",
            ranks(steps=courses(rates=lambda step: {"AdamW": (1e-5 * step,)}, schedule_rates={"LambdaLR": (1e-3,)})),
        ),
    ],
    "BXP402": [("known", ranks()), ("without accelerate", ranks(prepared=None))],
    "BXP403": [
        (
            "the last step of an epoch is short",
            ranks(
                prepared=Prepared(accumulation=4, wrapped=("AdamW",), unknown=()),
                steps=courses(micro_batches=lambda step: 2 if step == 6 else 4),
            ),
        ),
        ("a schedule of epochs", ranks(steps=courses(schedule_steps={"LambdaLR": 1}))),
        ("a script that calls no module", ranks(steps=courses(micro_batches=0))),
        ("one step that a scaler skipped", ranks(steps=courses(schedule_steps=lambda step: {"LambdaLR": step + (step > 3)}))),
    ],
    "BXP404": [
        ("a forgotten parameter", ranks(parameters=(live(), live(NORM, linked=False)))),
        ("a parameter held by the other rank", [rank(0, parameters=(live(linked=False),), stepped=()), rank(1)]),
        ("nobody looked", stepping(tensor(live_dtype=None), parameters=(live(linked=None),))),
        (
            "a partition that covers parameters",
            stepping(tensor(live_dtype=None, covers=(WEIGHT,)), parameters=(live(), live(NORM, linked=False))),
        ),
    ],
    "BXP405": [
        ("hybrid shards are FSDP", ranks(setup=setup("hsdp", "fsdp"))),
        ("DeepSpeed without ZeRO is DeepSpeed", ranks(setup=setup("deepspeed, no ZeRO", "zero"))),
        ("nobody asked", ranks(setup=setup("ddp", None))),
    ],
    "BXP406": [
        ("nobody asked for decay", flattened(groups=((0.0, 2),))),
        ("AdamW's own default is no wish", flattened(groups=((0.0, 2),), default_decay=0.01)),
        ("decayed elsewhere", stepping(tensor(shape=(1000,), weight_decay=0.0), tensor(NORM, shape=(1000,)))),
        ("vectors are not decayed", stepping(tensor(shape=(40,), live_ndim=1, weight_decay=0.0), groups=((0.1, 0), (0.0, 1)))),
    ],
    "BXP501": [
        ("at the first step", stepping(tensor(bf16_valued={"weight": 1.0}, steps_before=0), tensor(NORM))),
        ("too few to tell", stepping(tensor(bf16_valued={"weight": 1.0}, **FEW), tensor(NORM))),
        ("a group at a rate of zero", stepping(tensor(bf16_valued={"weight": 1.0}, lr=0.0), tensor(NORM))),
        ("early in a warm-up", stepping(tensor(bf16_valued={"weight": 1.0}, update_squared=3e-15), tensor(NORM))),
        ("nearly all", stepping(tensor(bf16_valued={"weight": 0.99}))),
        (
            "after one step, whose rate may have been zero",
            stepping(tensor(bf16_valued={"weight": 1.0}, steps_before=1), tensor(NORM)),
        ),
    ],
    "BXP502": [
        ("the weights are BXP501's", stepping(tensor(bf16_valued={"weight": 1.0}))),
        ("without momentum", stepping(tensor(bf16_valued={"exp_avg": 1.0}, betas=(0.0, 0.999)))),
        ("at the first step", stepping(tensor(bf16_valued={"exp_avg": 1.0}, steps_before=0), tensor(NORM))),
    ],
    "BXP503": [("the step counter", loading(held=told(MOMENTS | {"step": "float64"})))],
    "BXP504": [
        ("afterwards is BXP104's", stepping(tensor(live_differs=0.5))),
        ("no masters", stepping(half(live_differs_first=None))),
    ],
    "BXP601": [
        ("a few products in float32 on purpose", ranks(products={"bfloat16": 30, "float32": 14})),
        (
            "float32 throughout",
            ranks(
                contract=Contract(source="recipe fp32", compute="float32"),
                products={"float32": 44},
                autocast=Autocast(active=False),
            ),
        ),
        ("nobody asked", ranks(contract=None, setup=None, products={"float32": 44})),
    ],
    "BXP602": [("positions", ranks(buffers=(buffer("position_ids", "int64"), buffer("mask", "bfloat16"))))],
    "BXP603": [("float32", ranks())],
    "BXP604": [
        ("a master in the state", ranks(stepped=(half(state=MOMENTS | {"master_param": "float32"}),))),
        ("the lower half of one", ranks(stepped=(half(state=MOMENTS | {"master_param": "int16"}),))),
        ("nothing declared", stepping(half())),
        ("the witness fell after it had seen the steps", ranks(problems=("end: KeyError",))),
    ],
}
