"""Facts that each rule must not fire on, similar to those that it fires on."""

from __future__ import annotations

import math

from benchbox.observer.facts import (
    Autocast,
    ConfiguredReduction,
    Contract,
    OpaqueOptimizer,
    PreparedByAccelerate,
    RankFacts,
)
from tests.support.facts import (
    FEW,
    HALF_MOMENTS,
    KAHAN,
    MOMENTS,
    NORM,
    STOCHASTIC,
    WEIGHT,
    average,
    buffer,
    edq,
    flattened,
    frozen,
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

Facts = list[RankFacts]

CLEAN: dict[str, list[tuple[str, Facts]]] = {
    "BXP101": [
        ("nearly all, later", ranks_stepping(tensor(bf16_valued_later={"weight": 0.99}))),
        ("no step in between", ranks_stepping(tensor(bf16_valued_later={"weight": 1.0}, steps_before_later=10))),
        ("too few elements, later", ranks_stepping(tensor(bf16_valued_later={"weight": 1.0}, **FEW), tensor(NORM))),
        ("Kahan sums of float32 weights", ranks_stepping(tensor(bf16_valued_later={"weight": 1.0}, **KAHAN))),
        ("stochastic rounding", ranks_stepping(half(**STOCHASTIC))),
        ("a rank without elements", ranks_stepping(half(elements=0))),
    ],
    "BXP102": [
        ("nearly all arrive", edq(0.95)),
        ("a live weight that has masters", ranks_stepping(tensor(update_dot=0.0))),
        ("compensated", edq(0.1, **KAHAN)),
        ("one noisy tensor among good ones", ranks_stepping(half(), half(NORM, update_dot=1e-6, update_squared=1e-5))),
    ],
    "BXP103": [
        ("a scalar", ranks_stepping(half(elements=1, shape=(), pinned_steps=6))),
        ("a float32 weight at the start of a warm-up", ranks_stepping(tensor(pinned_steps=6, update_squared=3e-15))),
        ("three steps are enough", ranks(steps=step_facts(3))),
        ("compensated", ranks_stepping(half(pinned_steps=6, **KAHAN))),
    ],
    "BXP104": [
        ("masters in the optimizer's state", ranks_stepping(half(live_differs=0.1, compensation="state master_param"))),
        ("no masters", ranks_stepping(half(live_differs=None))),
    ],
    "BXP105": [
        ("declared", ranks_stepping(tensor(live_device="cuda:0", offload="DeepSpeedZeroOptimizer offloads its state"))),
        ("one of which the device is unknown", ranks_stepping(tensor(), tensor(NORM, live_device=None))),
    ],
    "BXP106": [
        ("a large one", ranks_stepping(half(lr=0.1))),
        ("float32", ranks_stepping(tensor(lr=1e-6))),
        ("none", ranks_stepping(half(weight_decay=0.0))),
        ("rounded stochastically", ranks_stepping(half(**STOCHASTIC))),
        ("a fused kernel, which rounds once", ranks_stepping(half(fused=True))),
        ("decay that is added to the gradient", ranks_stepping(half(decoupled_decay=False))),
        ("SGD of an old checkpoint", ranks_stepping(half(decoupled_decay=None, betas=None))),
    ],
    "BXP107": [
        ("nobody writes to it", ranks(averages=(average(written=False),))),
        ("less than half stays", ranks(averages=(average(stuck=399),))),
        ("few elements lag", ranks(averages=(average(lagging=31, stuck=31),))),
        ("seen for one step", ranks(averages=(average(steps=1),))),
    ],
    "BXP201": [
        ("0.995", ranks_stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.995)))),
        ("float32", ranks_stepping(tensor())),
        ("exactly 1 - 2^-8", ranks_stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 1 - 2.0**-8)))),
        ("an optimizer without betas", ranks_stepping(tensor(state=HALF_MOMENTS, betas=None))),
    ],
    "BXP202": [
        ("by design", ranks_stepping(half(state=HALF_MOMENTS, betas=(0.9, 0.95), **STOCHASTIC))),
        ("those of BXP201", ranks_stepping(tensor(state=HALF_MOMENTS))),
        ("a 16-bit step counter is BXP205's", ranks_stepping(tensor(**moments(step="bfloat16")))),
    ],
    "BXP203": [
        ("none is", ranks_stepping(tensor(**moments(exp_avg_sq="float16")))),
        ("float32", ranks_stepping(tensor(second_moment_zero=0.1))),
    ],
    "BXP204": [
        ("bfloat16 holds 1e-8", ranks_stepping(tensor(state=HALF_MOMENTS))),
        ("float16 holds 1e-7", ranks_stepping(tensor(**moments(exp_avg_sq="float16"), eps=1e-7))),
        ("a fused kernel, which adds in float32", ranks_stepping(tensor(**moments(exp_avg_sq="float16"), fused=True))),
        ("no eps at all", ranks_stepping(tensor(eps=0.0))),
        ("1e-40 in bfloat16", ranks_stepping(tensor(state=HALF_MOMENTS, eps=1e-40))),
        ("1e-44 in float32", ranks_stepping(tensor(eps=1e-44))),
    ],
    "BXP205": [
        ("a rank that was ended earlier", [rank(0), rank(1, stepped=(tensor(step_count=8.0),), steps=step_facts(3))]),
        ("one that holds no part of it", [rank(0), rank(1, stepped=(tensor(step_count=8.0, elements=0),))]),
        ("one whose count is unknown", [rank(0), rank(1, stepped=(tensor(step_count=None),))]),
    ],
    "BXP301": [("float32", ranks(steps=step_facts(micro_batches=4)))],
    "BXP302": [
        ("a flag in 16 bits", ranks(collectives=(reduction("float32"), reduction("bfloat16", elements=2)))),
        (
            "parameters are gathered in 16 bits",
            ranks(collectives=(reduction("float32"), reduction("bfloat16", operation="all_gather"))),
        ),
    ],
    "BXP303": [
        ("activations beside", ranks(collectives=(reduction("float32"), reduction("bfloat16", operation="all_reduce")))),
        (
            "as configured",
            ranks(collectives=(reduction("bfloat16"),), reduction=ConfiguredReduction(source="a hook", dtype="bfloat16")),
        ),
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
        ("no configured dtype", ranks(reduction=None, collectives=())),
        (
            "activations of tensor parallelism, ten times as many as gradients",
            ranks(collectives=(reduction("float32"), reduction("bfloat16", operation="all_reduce", elements=10_000))),
        ),
    ],
    "BXP304": [
        ("rounding", ranks(steps=step_facts(stepped_norm=1.005))),
        ("no clipping", ranks(steps=step_facts(max_norm=None, reported_norm=None))),
        ("a norm that is only logged", ranks(steps=step_facts(max_norm=None, reported_norm=5.0, stepped_norm=5.0))),
        ("a norm that was not reported", ranks(steps=step_facts(reported_norm=None))),
        ("infinite gradients", ranks(steps=step_facts(reported_norm=math.inf, stepped_norm=math.inf))),
        ("one rank whose norm was not read", [rank(0), rank(1, steps=step_facts(stepped_norm=None))]),
        ("a loss scale of 1", ranks(steps=step_facts(clip_scale=1.0, reported_norm=5.0, max_norm=0.5, stepped_norm=0.5))),
        ("a scaled norm below the limit", ranks(steps=step_facts(clip_scale=64.0, reported_norm=0.25, max_norm=0.5))),
        ("bfloat16 gradients", ranks_stepping(half(), steps=step_facts(stepped_norm=1.02))),
        ("no gradient at all", ranks(steps=step_facts(reported_norm=0.0, stepped_norm=0.0))),
        ("gradients that are not finite", ranks(steps=step_facts(reported_norm=math.nan, stepped_norm=math.nan))),
    ],
    "BXP305": [
        ("autocast to float16 that is off", ranks(autocast=Autocast(active=False, dtype="float16"))),
        ("autocast that was not seen", ranks(autocast=None)),
        ("scaled", ranks_stepping(tensor(gradient_dtype="float16"), scaler=scaler(8, 1))),
        ("a frozen float16 teacher", ranks(products={"float16": 10, "bfloat16": 40})),
        ("a large one", ranks(products={"float16": 40, "float32": 10}, products_with_gradient={"float32": 10})),
        ("a scaler could not be observed", ranks_stepping(half(dtype="float16"), missing={"scaler": "a checkpoint"})),
        ("a single skipped step", ranks(scaler=scaler(1, 1))),
    ],
    "BXP401": [
        (
            "another optimizer has no schedule",
            ranks(
                steps=step_facts(
                    rates=lambda step: {"AdamW": (1e-3 / step,), "SGD": (0.1,)},
                    schedule_rates=lambda step: {"LambdaLR": (1e-3 / step,)},
                )
            ),
        ),
        (
            "a warm-up that begins at zero",
            ranks(steps=(*step_facts(rates={"AdamW": (0.0,)}, schedule_rates={}), *step_facts())),
        ),
        (
            "a schedule that begins at zero",
            ranks(
                steps=step_facts(
                    rates=lambda step: {"AdamW": (1e-3 * (step - 1),)},
                    schedule_rates=lambda step: {"LambdaLR": (1e-3 * (step - 1),)},
                )
            ),
        ),
        ("one group of several", ranks(steps=step_facts(schedule_rates=lambda step: {"LambdaLR": (1e-3 / step, 5e-4 / step)}))),
        (
            "left over from a discarded optimizer",
            ranks(
                steps=step_facts(schedule_rates=lambda step: {"LambdaLR": (1e-3 / step,), "LambdaLR 2": (1e-3 / step**2,)}),
                schedules=(*schedules("LambdaLR"), *schedules("LambdaLR 2", reaches=False)),
            ),
        ),
        (
            "left over from an earlier stage, and constant",
            ranks(
                steps=step_facts(rates={"AdamW": (1e-4,)}, schedule_rates={"LambdaLR": (1e-3,)}),
                schedules=schedules("LambdaLR", reaches=False),
            ),
        ),
        (
            "a schedule by epochs, and rates set by hand",
            ranks(steps=step_facts(rates=lambda step: {"AdamW": (1e-5 * step,)}, schedule_rates={"LambdaLR": (1e-3,)})),
        ),
    ],
    "BXP402": [("known", ranks()), ("without accelerate", ranks(prepared=None))],
    "BXP403": [
        (
            "a shorter accumulation at the end of an epoch",
            ranks(
                prepared=PreparedByAccelerate(accumulation=4, wrapped=("AdamW",), unknown=()),
                steps=step_facts(micro_batches=lambda step: 2 if step == 6 else 4),
            ),
        ),
        (
            "a dataset shorter than the accumulation",
            ranks(
                prepared=PreparedByAccelerate(accumulation=4, wrapped=("AdamW",), unknown=()),
                steps=step_facts(micro_batches=2, ends_epoch=True),
            ),
        ),
        ("a schedule by epochs", ranks(steps=step_facts(schedule_steps={"LambdaLR": 1}))),
        ("a script that calls no module", ranks(steps=step_facts(micro_batches=0))),
        ("a first step that was not counted", ranks(steps=step_facts(micro_batches=lambda step: 1 if step > 1 else None))),
        (
            "one step that a scaler skipped",
            ranks(steps=step_facts(schedule_steps=lambda step: {"LambdaLR": step + (step > 3)})),
        ),
    ],
    "BXP404": [
        ("a forgotten parameter", ranks(parameters=(live(), live(NORM, linked=False)))),
        (
            "a parameter that the other rank holds, and that stays as it is",
            [rank(0, parameters=(live(linked=False, gradient="bfloat16", unmoved_steps=20),), stepped=()), rank(1)],
        ),
        ("a parameter held by the other rank", [rank(0, parameters=(live(linked=False),), stepped=()), rank(1)]),
        (
            "a temperature that is learned beside the model",
            ranks_stepping(tensor(), unlinked(elements=1), parameters=(live(), live(NORM, linked=False))),
        ),
        ("weights that move without an optimizer that was seen", ranks_stepping(parameters=(live(linked=None),))),
        ("the average of another model", ranks(parameters=(live(), live("average.weight", linked=None)))),
        (
            "a partition that covers parameters",
            ranks_stepping(tensor(live_dtype=None, covers=(WEIGHT,)), parameters=(live(), live(NORM, linked=False))),
        ),
        (
            "no element of it on this rank",
            ranks_stepping(unlinked(), parameters=(live(), live(NORM, linked=False, elements=0))),
        ),
        ("a weight that had no gradient", ranks(parameters=(live(), live(NORM, unmoved_steps=12)))),
        (
            "no element on this rank that could move",
            ranks(parameters=(live(), live(NORM, elements=0, gradient="float32", unmoved_steps=12))),
        ),
        ("a rank whose part is stepped on another one", [rank(0, stepped=(), parameters=(live(unmoved_steps=3),)), rank(1)]),
        ("a frozen parameter", ranks_stepping(tensor(live_dtype=None), parameters=(live(linked=False, trainable=False),))),
        (
            "an unreadable optimizer",
            ranks(
                stepped=(), opaque=(OpaqueOptimizer(optimizer="Mystery", reason="unknown"),), parameters=(live(linked=False),)
            ),
        ),
    ],
    "BXP405": [
        ("hybrid shards are FSDP", ranks(setup=setup("hsdp", "fsdp"))),
        ("DeepSpeed without ZeRO is DeepSpeed", ranks(setup=setup("deepspeed, no ZeRO", "zero"))),
        ("no requested backend", ranks(setup=setup("ddp", None))),
    ],
    "BXP407": [
        ("shards", replicas((tensor(),), (tensor(digest_before="ab", digest_after="ef"),))),
        ("shards of zeros", replicas((tensor(digest_before=None),), (tensor(digest_before=None, digest_after="ef"),))),
        ("probed in fewer steps", replicas((tensor(),), (tensor(steps=2, digest_after="ef"),))),
        ("shards of other sizes", replicas((tensor(),), (tensor(shape=(20, 25), digest_after="ef"),))),
        ("two of one name", replicas((tensor(),), (tensor(digest_after="ef"), tensor()))),
        ("not the facts of all ranks", [rank(0, world_size=3), rank(1, world_size=3, stepped=(tensor(digest_after="ef"),))]),
    ],
    "BXP406": [
        ("no requested decay", flattened(groups=((0.0, 2),))),
        ("the default of AdamW is no request", flattened(groups=((0.0, 2),), default_decay=0.01)),
        (
            "decayed elsewhere",
            ranks_stepping(
                tensor(shape=(1000,), weight_decay=0.0), tensor(NORM, shape=(1000,)), groups=((0.1, 0), (0.1, 1), (0.0, 1))
            ),
        ),
        (
            "vectors are not decayed",
            ranks_stepping(tensor(shape=(40,), live_ndim=1, weight_decay=0.0), groups=((0.1, 0), (0.0, 1))),
        ),
        ("shards that keep their dimensions", ranks_stepping(tensor(weight_decay=0.0), groups=((0.1, 0), (0.0, 2)))),
        ("an empty group that was not to decay", flattened(groups=((0.0, 0), (0.0, 2)))),
        ("a group whose parameters had no gradient", flattened(groups=((0.1, 2), (0.0, 2)))),
        ("one unknown shape", ranks_stepping(tensor(weight_decay=0.0), tensor(NORM, weight_decay=0.0, live_ndim=None))),
        ("an optimizer without weight decay", flattened(groups=((0.0, 2),), default_decay=None)),
    ],
    "BXP501": [
        ("bfloat16 by type", ranks_stepping(half(bf16_valued={"weight": 1.0}))),
        ("at the first step", ranks_stepping(tensor(bf16_valued={"weight": 1.0}, steps_before=0), tensor(NORM))),
        ("too few elements", ranks_stepping(tensor(bf16_valued={"weight": 1.0}, **FEW), tensor(NORM))),
        ("a group at a rate of zero", ranks_stepping(tensor(bf16_valued={"weight": 1.0}, lr=0.0), tensor(NORM))),
        ("early in a warm-up", ranks_stepping(tensor(bf16_valued={"weight": 1.0}, update_squared=3e-15), tensor(NORM))),
        ("nearly all", ranks_stepping(tensor(bf16_valued={"weight": 0.99}))),
        (
            "after one step, whose rate may have been zero",
            ranks_stepping(tensor(bf16_valued={"weight": 1.0}, steps_before=1), tensor(NORM)),
        ),
    ],
    "BXP502": [
        ("the weights are BXP501's", ranks_stepping(tensor(bf16_valued={"weight": 1.0}))),
        ("without momentum", ranks_stepping(tensor(bf16_valued={"exp_avg": 1.0}, betas=(0.0, 0.999)))),
        ("a beta1 of 0.5", ranks_stepping(tensor(bf16_valued_later={"exp_avg": 1.0}, betas=(0.5, 0.999)))),
        ("nearly all, later", ranks_stepping(tensor(bf16_valued_later={"exp_avg": 0.99, "exp_avg_sq": 0.99}))),
        (
            "not compared after steps",
            ranks_stepping(tensor(bf16_valued_later={"exp_avg": 1.0}, steps_before=0, steps_before_later=None), tensor(NORM)),
        ),
        ("no step in between", ranks_stepping(tensor(bf16_valued_later={"exp_avg": 1.0}, steps_before_later=10))),
        ("too few elements, later", ranks_stepping(tensor(bf16_valued_later={"exp_avg": 1.0}, **FEW), tensor(NORM))),
        ("moments in bfloat16", ranks_stepping(tensor(bf16_valued_later={"exp_avg": 1.0}, state=HALF_MOMENTS))),
        ("at the first step", ranks_stepping(tensor(bf16_valued={"exp_avg": 1.0}, steps_before=0), tensor(NORM))),
    ],
    "BXP503": [("the step counter", loading(held=single_dtypes(MOMENTS | {"step": "float64"})))],
    "BXP504": [
        ("afterwards is BXP104's", ranks_stepping(tensor(live_differs=0.5))),
        ("no masters", ranks_stepping(half(live_differs_first=None))),
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
        ("no requested dtype", ranks(contract=None, setup=None, products={"float32": 44})),
        ("autocast that accelerate was asked for", ranks(contract=None)),
        ("half of the products", ranks(products={"bfloat16": 22, "float32": 22})),
    ],
    "BXP602": [
        ("positions", ranks(buffers=(buffer("position_ids", "int64"), buffer("mask", "bfloat16")))),
        ("a norm that is no normaliser", ranks(buffers=(buffer("layers.0.norm.scale", "bfloat16"),))),
        ("a trained scale in a normaliser", ranks(parameters=(live("normalizer.scale"),))),
        (
            "a part of another word",
            ranks(buffers=tuple(buffer(name, "bfloat16") for name in ("property.w", "europe", "a.newstats", "ropeway"))),
        ),
        ("a frozen matrix", ranks(parameters=(frozen("layers.0.rotary.proj", ndim=2), frozen("normalizer.mean", ndim=2)))),
        ("of a checkpoint without optimizer", ranks(parameters=(frozen("log_std"), frozen("rope.x")), source="checkpoint")),
    ],
    "BXP603": [("float32", ranks()), ("float64", ranks(default_dtype="float64"))],
    "BXP604": [
        ("a master in the state", ranks(stepped=(half(state=MOMENTS | {"master_param": "float32"}),))),
        ("the lower half of one", ranks(stepped=(half(state=MOMENTS | {"master_param": "int16"}),))),
        ("nothing declared", ranks_stepping(half())),
        ("complex numbers", ranks(stepped=(tensor(dtype="complex64", state={"exp_avg": "complex64"}),))),
    ],
}
