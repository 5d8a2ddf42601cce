"""Facts that each rule must fire on, and the severity of the finding."""

from __future__ import annotations

from dataclasses import replace

from benchbox.observer.facts import (
    Autocast,
    Contract,
    OpaqueOptimizer,
    PreparedByAccelerate,
    RankFacts,
)
from tests.support.facts import (
    HALF_MOMENTS,
    KAHAN,
    MOMENTS,
    NORM,
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

STORAGE = Contract(source="a flag", storage="float32")
SENSITIVE_NAMES = (
    *("layers.0.rotary.original_inv_freq", "rotary_emb.cos", "freqs_cis", "rope.table", "mrope_section", "rope2d.angles"),
    *("dataset_stats.action.min", "norm_stats", "action_quantiles", "normalizer.state.mean", "normal_action_std", "state_std"),
)


def exp_avg(dtype: str) -> dict[str, tuple[str, ...]]:
    """Return the dtypes of a first moment alone."""
    return {"exp_avg": (dtype,)}


FIRES: dict[str, list[tuple[str, str, Facts]]] = {
    "BXP101": [
        ("float32, rounded after every step", "error", ranks_stepping(tensor(bf16_valued_later={"weight": 1.0}))),
        ("live bfloat16", "error", ranks_stepping(half())),
        ("bfloat16 masters", "error", ranks_stepping(tensor(dtype="bfloat16"))),
        ("float16", "error", ranks_stepping(half(dtype="float16"))),
        ("an adapter", "warning", ranks_stepping(half("layer.lora_A.weight", update_dot=1e-3))),
        ("an adapter of another library", "warning", ranks_stepping(half("layer.adapters.down.weight", update_dot=1e-3))),
        ("an adapter whose updates arrive", "info", ranks_stepping(half("layer.lora_A.weight"))),
        ("on one rank", "error", [rank(0, contract=None), rank(1, contract=None, stepped=(half(),))]),
        (
            "an adapter with unknown updates",
            "warning",
            ranks_stepping(half("layer.lora_A.weight", updates=0, update_squared=0.0, update_dot=0.0)),
        ),
        ("a projector named adapter", "error", ranks_stepping(half("vision_adapter.weight"))),
    ],
    "BXP102": [("most are lost", "error", edq(0.1)), ("some are lost", "warning", edq(0.7))],
    "BXP103": [
        ("a bfloat16 norm", "error", ranks_stepping(half(NORM, pinned_steps=6))),
        ("a bfloat16 norm for three steps", "error", ranks_stepping(half(NORM, pinned_steps=3))),
        ("a float32 weight that is reset after each step", "error", ranks_stepping(tensor(pinned_steps=6))),
        ("a bfloat16 norm, by small updates", "error", ranks_stepping(half(NORM, pinned_steps=6, update_squared=3e-15))),
    ],
    "BXP104": [("one element in a thousand", "error", ranks_stepping(tensor(live_differs=0.001)))],
    "BXP105": [
        ("a master", "error", ranks_stepping(tensor(device="cpu", live_device="cuda:0", state_devices={}))),
        ("a moment", "error", ranks_stepping(tensor(state_devices={"exp_avg": "cuda:0"}))),
    ],
    "BXP106": [
        ("bfloat16", "warning", ranks_stepping(half())),
        ("a Kahan sum without the weight decay", "warning", ranks_stepping(half(**KAHAN))),
        ("a Kahan sum in a kernel", "warning", ranks_stepping(half(**KAHAN, fused=True))),
        ("an unknown kind of decay", "warning", ranks_stepping(half(decoupled_decay=None))),
    ],
    "BXP107": [
        ("most elements", "error", ranks(averages=(average(),))),
        ("half of them, over two tensors", "error", ranks(averages=(average(stuck=0), average(stuck=800)))),
    ],
    "BXP201": [
        ("0.999", "error", ranks_stepping(tensor(state=HALF_MOMENTS))),
        ("exactly 1 - 2^-9", "error", ranks_stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 1 - 2.0**-9)))),
        ("0.998", "warning", ranks_stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.998)))),
        ("rounded after every step", "error", ranks_stepping(tensor(bf16_valued_later={"exp_avg_sq": 1.0}))),
    ],
    "BXP202": [
        ("float32 weights at a low beta2", "info", ranks_stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.95)))),
        ("16-bit weights at a low beta2", "warning", ranks_stepping(half(state=HALF_MOMENTS, betas=(0.9, 0.95)))),
        ("the first moment only", "warning", ranks_stepping(tensor(**moments(exp_avg="bfloat16")))),
        ("momentum", "warning", ranks_stepping(tensor(state={"momentum_buffer": "bfloat16"}, betas=None))),
        ("8 bits in blocks", "info", ranks_stepping(tensor(**moments(exp_avg="uint8", exp_avg_sq="uint8")))),
        ("float32 weights at 0.995", "info", ranks_stepping(tensor(state=HALF_MOMENTS, betas=(0.9, 0.995)))),
    ],
    "BXP203": [("a share of v", "error", ranks_stepping(tensor(**moments(exp_avg_sq="float16"), second_moment_zero=0.01)))],
    "BXP204": [
        ("1e-8 in float16", "error", ranks_stepping(tensor(**moments(exp_avg_sq="float16")))),
        ("1e-42 in bfloat16", "error", ranks_stepping(tensor(state=HALF_MOMENTS, eps=1e-42))),
        ("1e-46 in float32", "error", ranks_stepping(tensor(eps=1e-46))),
        ("1e-46 in a fused kernel", "error", ranks_stepping(tensor(**moments(exp_avg_sq="float16"), eps=1e-46, fused=True))),
    ],
    "BXP205": [
        ("bfloat16", "error", ranks_stepping(tensor(**moments(step="bfloat16")))),
        ("ranks disagree", "error", [rank(0), rank(1, stepped=(tensor(step_count=8.0),))]),
        (
            "two ranks disagree beside one that was ended earlier",
            "error",
            [
                rank(0),
                rank(1, stepped=(tensor(step_count=8.0),)),
                rank(2, stepped=(tensor(step_count=5.0),), steps=step_facts(3)),
            ],
        ),
    ],
    "BXP301": [("bfloat16", "warning", ranks(accumulated_in=("bfloat16",), steps=step_facts(micro_batches=4)))],
    "BXP302": [
        ("two ranks", "info", ranks(collectives=(reduction("bfloat16"),), reduction=None)),
        ("64 ranks", "warning", ranks(collectives=(reduction("bfloat16"),), reduction=None, world_size=64)),
    ],
    "BXP303": [("bfloat16 for float32", "error", ranks(collectives=(reduction("bfloat16"),)))],
    "BXP304": [
        ("larger than the limit", "error", ranks(steps=step_facts(stepped_norm=1.5))),
        ("no gradient was clipped", "error", ranks(steps=step_facts(reported_norm=0.0))),
    ],
    "BXP305": [
        ("float16 gradients", "error", ranks_stepping(tensor(gradient_dtype="float16"))),
        ("autocast", "error", ranks(autocast=Autocast(active=True, dtype="float16"))),
        ("products before a checkpoint of activations", "error", ranks(products={"float16": 10})),
        ("all steps skipped", "error", ranks(scaler=scaler(8, 8))),
        ("all steps skipped, so none was seen", "error", ranks(scaler=scaler(8, 8), stepped=(), missing={"stepped": "none"})),
    ],
    "BXP401": [
        ("a rate of zero that stays", "error", ranks(steps=step_facts(rates={"AdamW": (0.0,)}, schedule_rates={}) * 2)),
        ("a rate that stays", "error", ranks(steps=step_facts(rates={"AdamW": (1e-3,)}))),
        (
            "the schedule of a discarded optimizer",
            "error",
            ranks(steps=step_facts(rates={"AdamW": (1e-3,)}), schedules=schedules("LambdaLR", reaches=False)),
        ),
        (
            "one of two optimizers",
            "error",
            ranks(
                steps=step_facts(
                    rates=lambda step: {"AdamW": (1e-3,), "SGD": (0.1 / step,)},
                    schedule_rates=lambda step: {"LambdaLR": (1e-3 / step,), "LambdaLR 2": (0.1 / step,)},
                ),
                schedules=schedules("LambdaLR", "LambdaLR 2"),
            ),
        ),
        (
            "the second of two schedules",
            "error",
            ranks(
                steps=step_facts(
                    rates=lambda step: {"AdamW": (1e-3,), "SGD": (0.1 / step,)},
                    schedule_rates=lambda step: {"LambdaLR": (1e-3 / step,), "LambdaLR 2": (0.1 / step,)},
                ),
                schedules=schedules("LambdaLR 2", "LambdaLR"),
            ),
        ),
    ],
    "BXP402": [
        (
            "a duck-typed wrapper",
            "warning",
            ranks(prepared=PreparedByAccelerate(accumulation=1, wrapped=(), unknown=("AdamW",))),
        ),
        ("under accumulation", "error", ranks(prepared=PreparedByAccelerate(accumulation=4, wrapped=(), unknown=("AdamW",)))),
    ],
    "BXP403": [
        (
            "a schedule for each micro-batch",
            "error",
            ranks(steps=step_facts(schedule_steps=lambda step: {"LambdaLR": 4 * step})),
        ),
        (
            "a schedule for each micro-batch, of which an epoch's last window has one",
            "error",
            ranks(steps=step_facts(schedule_steps=lambda step: {"LambdaLR": 4 * step - 3 * (step // 3)})),
        ),
        ("a schedule for each process", "info", ranks(steps=step_facts(schedule_steps=lambda step: {"LambdaLR": 2 * step}))),
        (
            "an optimizer for each micro-batch",
            "error",
            ranks(prepared=PreparedByAccelerate(accumulation=4, wrapped=("AdamW",), unknown=())),
        ),
        ("two steps for one forward pass", "error", ranks(steps=step_facts(micro_batches=lambda step: step % 2))),
        (
            "a schedule twice a step, without accelerate",
            "error",
            ranks(prepared=None, steps=step_facts(schedule_steps=lambda step: {"LambdaLR": 2 * step})),
        ),
    ],
    "BXP404": [
        ("linked to tensors that nothing steps", "error", ranks(stepped=(), parameters=(live(unmoved_steps=3),))),
        (
            "others",
            "error",
            ranks_stepping(unlinked(), parameters=(live(linked=False),)),
        ),
        ("none", "error", ranks_stepping(parameters=(live(linked=False),))),
        ("a head that was replaced", "error", ranks(parameters=(live(linked=False),), strangers=("AdamW parameter 2",))),
        (
            "a head that was replaced, beside an average that moves",
            "error",
            ranks(parameters=(live(linked=False), live("average.weight", linked=None)), strangers=("AdamW parameter 2",)),
        ),
        (
            "left out, as is a weight of its name in another model",
            "info",
            ranks(parameters=(live(linked=False, gradient="float32", unmoved_steps=12), live(linked=False))),
        ),
    ],
    "BXP405": [
        ("fsdp became ddp", "error", ranks(setup=setup("ddp", "fsdp"))),
        ("zero became ddp", "error", ranks(setup=setup("ddp", "zero"))),
    ],
    "BXP406": [
        ("a group without parameters", "error", flattened(groups=((0.1, 0), (0.0, 2)))),
        ("a default that groups override", "error", flattened(groups=((0.0, 2),), default_decay=0.1)),
    ],
    "BXP407": [
        ("one of two tensors", "error", replicas((tensor(), tensor(NORM)), (tensor(digest_after="beef"), tensor(NORM)))),
        ("all tensors", "warning", replicas((tensor(),), (tensor(digest_after="beef"),))),
        ("all tensors under DDP", "error", replicas((tensor(),), (tensor(digest_after="beef"),), setup=setup("ddp", None))),
        (
            "beside one that no step moved",
            "warning",
            replicas(
                (tensor(), tensor(NORM, digest_after="5eed")), (tensor(digest_after="beef"), tensor(NORM, digest_after="5eed"))
            ),
        ),
    ],
    "BXP501": [
        ("masters", "error", ranks_stepping(tensor(bf16_valued={"weight": 1.0}))),
        ("float32 weights", "error", ranks_stepping(tensor(live=True, live_dtype="float32", bf16_valued={"weight": 1.0}))),
        (
            "after two steps, of 64 elements",
            "error",
            ranks_stepping(tensor(bf16_valued={"weight": 1.0}, steps_before=2, elements=64)),
        ),
    ],
    "BXP502": [
        ("the first moment", "warning", ranks_stepping(tensor(bf16_valued={"weight": 0.0, "exp_avg": 1.0}))),
        (
            "the second moment, without momentum",
            "warning",
            ranks_stepping(tensor(bf16_valued={"exp_avg_sq": 1.0}, betas=(0.0, 0.999))),
        ),
        (
            "rounded after every step of a training that was not resumed",
            "warning",
            ranks_stepping(tensor(bf16_valued_later={"exp_avg": 1.0}, bf16_valued={}, steps_before=0, steps_before_later=3)),
        ),
    ],
    "BXP503": [
        ("to bfloat16", "error", loading(held=single_dtypes(HALF_MOMENTS))),
        ("to float16, which has fewer large numbers", "error", loading(given=exp_avg("bfloat16"), held=exp_avg("float16"))),
        ("to float32", "info", loading(given=exp_avg("bfloat16"), held=exp_avg("float32"))),
        ("to float64, of two dtypes", "info", loading(given={"exp_avg": ("bfloat16", "float32")}, held=exp_avg("float64"))),
        ("to float32, of two dtypes", "info", loading(given={"exp_avg": ("bfloat16", "float32")}, held=exp_avg("float32"))),
        ("to bfloat16, of two dtypes", "error", loading(given={"exp_avg": ("bfloat16", "float32")}, held=exp_avg("bfloat16"))),
        ("to two dtypes", "error", loading(given=exp_avg("bfloat16"), held={"exp_avg": ("bfloat16", "float32")})),
        ("to nothing", "error", loading(given={}, held={}, before=single_dtypes(MOMENTS))),
    ],
    "BXP504": [("before the first step", "error", ranks_stepping(tensor(live_differs_first=1.0)))],
    "BXP601": [
        ("inactive", "warning", ranks(products={"float32": 44}, autocast=Autocast(active=False))),
        ("requested from accelerate", "warning", ranks(products={"float32": 44}, contract=None)),
        ("unrequested", "warning", ranks(contract=None, setup=setup("ddp", None, "no"))),
        ("unrequested, beside a declared storage", "warning", ranks(contract=STORAGE, setup=setup("ddp", None, "no"))),
        ("requested from accelerate, beside a declared storage", "warning", ranks(contract=STORAGE, products={"float32": 44})),
        (
            "where float32 was declared",
            "warning",
            ranks(contract=Contract(source="recipe fp32", compute="float32"), products={"float32": 44}),
        ),
    ],
    "BXP602": [
        ("rotary", "warning", ranks(buffers=(buffer("layers.0.rotary.inv_freq", "bfloat16"),))),
        ("running", "warning", ranks(buffers=(buffer("bn.running_var", "float16"),))),
        ("of observations", "warning", ranks(buffers=(buffer("obs_mean", "bfloat16"),))),
        ("in a normaliser", "warning", ranks(buffers=(buffer("normalize_inputs.state.min", "bfloat16"),))),
        ("in a module of that class", "warning", ranks(buffers=(replace(buffer("a.scale", "bfloat16"), module="Normalizer"),))),
        ("a constant parameter", "warning", ranks(parameters=(frozen("unnormalize.action.offset"),))),
        ("one of unknown shape", "warning", ranks(parameters=(frozen("unnormalize.action.offset", ndim=None),))),
        *((f"named {name}", "warning", ranks(buffers=(buffer(name, "bfloat16"),))) for name in SENSITIVE_NAMES),
        (
            "a constant beside trained weights of a checkpoint",
            "warning",
            ranks(parameters=(live(), frozen("normalizer.mean")), source="checkpoint"),
        ),
    ],
    "BXP603": [("bfloat16", "warning", ranks(default_dtype="bfloat16"))],
    "BXP604": [
        ("stepped", "error", ranks(stepped=(half(),))),
        ("moments", "error", ranks(stepped=(tensor(state=HALF_MOMENTS),))),
        ("storage", "error", ranks(contract=STORAGE)),
        ("unknown, over float32", "info", ranks(opaque=(OpaqueOptimizer(optimizer="Own", reason="unknown", lossless=True),))),
        ("unreadable", "unknown", ranks(opaque=(OpaqueOptimizer(optimizer="Mystery", reason="its arithmetic is unknown"),))),
        (
            "the observer failed",
            "unknown",
            [rank(0, stepped=(), problems=("begin: KeyError",), missing={"stepped": "the observer failed"})],
        ),
    ],
}
