"""Edits that a forger would make to a launch record, each with the invariant that it violates and what `verify` says of it."""

from __future__ import annotations

from benchbox.spec.cell import Cell


def relabel(record, **changes):
    """Edit a cell everywhere that a careful forger would: configuration and id as well."""
    record["cell"] = {**record["cell"], **changes}
    record["config"] = dict(record["cell"])
    record["cell_id"] = Cell.from_dict(dict(record["cell"])).cell_id
    if "backend" in changes:
        record["observed"]["backend"] = changes["backend"]


def as_fsdp2(record, *, shards=False):
    relabel(record, backend="fsdp2")
    record["observed"] |= {"sharding": "S(0) on mesh (2,) in 7 units", "model_class": "FSDPPolicy"}
    if shards:
        record["observed"]["shard_numel"] = [numel // 2 for numel in record["observed"]["shard_numel"]]


def as_fp32(record, *, census=False):
    relabel(record, recipe="fp32")
    for entry in record["precision"]["census"] if census else ():
        if entry["dtype"] == "bfloat16" and entry["kind"] != "reduction":
            entry |= {"dtype": "float32", "bytes": 2 * entry["bytes"]}


def without_recomputation(record):
    relabel(record, checkpointing=True)
    record["observed"]["checkpointed_modules"] = 4
    record["flops"]["recomputed_flops_per_step"] = 0
    for tower in record["flops"]["per_tower"].values():
        tower["recomputed"] = 0


def as_longest(corrupt):
    """Return an edit of a record whose cell asks for `padding: longest`."""

    def apply(record):
        relabel(record, padding="longest")
        corrupt(record)

    return apply


def scale_memory(record, factor):
    for peak in [*record["memory"]["per_rank"], record["memory"]["worst"]]:
        peak["allocated_peak_bytes"] = int(peak["allocated_peak_bytes"] * factor)


def name_another_worst_rank(record):
    first, second = record["memory"]["per_rank"]
    first["allocated_peak_bytes"] = second["allocated_peak_bytes"] - 1
    record["memory"]["worst"] |= {"rank": 0, "allocated_peak_bytes": second["allocated_peak_bytes"]}


def scale_times(record, factor):
    """Make a launch faster in every figure that a report reads."""
    times = record["step_time_s"]
    times["per_rank"] = [[step * factor for step in steps] for steps in times["per_rank"]]
    times["slowest"] = [max(step) for step in zip(*times["per_rank"], strict=True)]
    for phase in (*record["phases_s"].values(), *record["step_split_s"].values()):
        phase["per_rank"] = [[step * factor for step in steps] for steps in phase["per_rank"]]
    throughput = record["throughput"]
    throughput["global_samples_per_s"] = 2 / ((times["slowest"][0] + times["slowest"][1]) / 2)
    throughput["per_rank_samples_per_s"] = [1 / ((first + second) / 2) for first, second in times["per_rank"]]


def as_bf16_pure(record):
    """Relabel a launch of `bf16_master` whose masters and moments are in 16 bits, in the census too."""
    relabel(record, recipe="bf16_pure")
    for entry in record["precision"]["census"]:
        if entry["kind"] in ("master", "exp_avg", "exp_avg_sq"):
            entry |= {"dtype": "bfloat16", "bytes": entry["bytes"] // 2}


def move_to_transfer(record):
    parts = record["step_split_s"]
    parts["compute"]["per_rank"][0][0] -= 1.0
    parts["transfer"]["per_rank"][0][0] += 1.0


def census_of(record, kind):
    return next(entry for entry in record["precision"]["census"] if entry["kind"] == kind)


def edit(path, value):
    """Return an edit that sets one value of a record, named by its keys."""

    def apply(record):
        *parents, last = path.split(".")
        for key in parents:
            record = record[int(key) if isinstance(record, list) else key]
        last = int(last) if isinstance(record, list) else last
        record[last] = value(record[last]) if callable(value) else value

    return apply


BACKEND, SHARDS = "the backend observed is the one requested", "shards of all ranks add up to what is trained"
CENSUS = "the census has every rank, and the sizes of its shards"
RECIPE = "the dtypes of the census are those of the recipe"
COLLECTIVES = "collectives carry the gradients, and the parameters that are gathered"
ATTENTION = "the attention kernel is the one requested, at every call site"
SIZES = "micro-batches have the sizes that the padding allows"
WORST = "worst memory = maximum over ranks"
THROUGHPUT = "throughput follows from the slowest rank's step times"
LIMIT = "no peak is above the memory limit, on a host by more than 1%"
PARTS = "the parts of a step add up to it on every rank, to at most 2% more"
NUMBERS, FINDINGS = "numbers of the audit are possible", "16-bit state in the census has its findings"
NULLS = "nothing is unknown without a reason"
FAILED = {"type": "RuntimeError", "message": "illegal memory access", "rank": 1, "phase": None, "traceback": None}

RECORD_CORRUPTIONS = {  # backend of the record, edit, sentence of the invariant, part of the message
    "another backend ran": ("ddp", edit("observed.backend", "single"), BACKEND, "observed single"),
    "ddp is called fsdp2": ("ddp", lambda r: relabel(r, backend="fsdp2"), BACKEND, "no sharding 'replicated'"),
    "and its sharding is forged": ("ddp", as_fsdp2, SHARDS, "steps all"),
    "and its shards are": ("ddp", lambda r: as_fsdp2(r, shards=True), CENSUS, "first moments"),
    "one rank ran": ("ddp", edit("observed.world_size", 1), "the world size observed is the one requested", "observed 1"),
    "single on two ranks": ("ddp", lambda r: relabel(r, backend="single"), "the backend can run such a cell", "at most 1 rank"),
    "another kernel": ("ddp", edit("observed.attention_kernel", "eager"), ATTENTION, "requested sdpa"),
    "another kernel at a site": ("ddp", edit("observed.attention_sites", {"layers.*": ["eager"]}), ATTENTION, "call sites ran"),
    "cut under full padding": (
        "ddp",
        edit("observed.micro_batch_sizes.1.cameras.spec", lambda n: n + 1),
        SIZES,
        "rank 1: requested padding full, observed micro-batches that were cut: cameras 1 of 2",
    ),
    "longer than the spec": (
        "ddp",
        as_longest(edit("observed.micro_batch_sizes.0.prompt.largest", lambda n: n + 1)),
        SIZES,
        "rank 0: observed micro-batches of impossible sizes: prompt",
    ),
    "no camera at all": ("ddp", as_longest(edit("observed.micro_batch_sizes.0.cameras.smallest", 0)), SIZES, "cameras 0 to 1"),
    "specs of two policies": ("ddp", lambda r: r["observed"]["micro_batch_sizes"][1].pop("prompt"), SIZES, "ranks differ in"),
    "sizes of one rank": ("ddp", lambda r: r["observed"]["micro_batch_sizes"].pop(), SIZES, "sizes on 1 of 2 ranks"),
    "sizes that are not known": (
        "ddp",
        edit("observed.micro_batch_sizes.1", None),
        NULLS,
        "observed.micro_batch_sizes is null",
    ),
    "checkpointed unasked": ("ddp", edit("observed.checkpointed_modules", 4), "checkpointing is as requested", "requested off"),
    "recomputed nothing": ("ddp", without_recomputation, "checkpointing is as requested", "nothing was recomp"),
    "a lost shard": ("fsdp2", edit("observed.shard_numel.1", lambda n: n - 1000), SHARDS, "elements together"),
    "more trained than there is": ("ddp", edit("observed.trainable_numel", lambda n: n + 1), SHARDS, "elements train, of"),
    "frozen in name only": ("ddp", lambda r: relabel(r, freeze="freeze_vision"), SHARDS, "freeze freeze_vision, and all"),
    "no census of a rank": (
        "ddp",
        lambda r: r["precision"].update(census=[entry for entry in r["precision"]["census"] if entry["rank"] == 0]),
        CENSUS,
        "a census of ranks 0",
    ),
    "bytes of another dtype": (
        "ddp",
        lambda r: census_of(r, "exp_avg").update(dtype="bfloat16"),
        CENSUS,
        "bfloat16 exp_avg in",
    ),
    "a tensor elsewhere": ("ddp", lambda r: census_of(r, "master").update(device="cuda:0"), CENSUS, "master on cuda:0"),
    "an edited recipe": ("fsdp2", as_fp32, RECIPE, "fp32 has float32"),
    "a recipe of 16-bit moments": ("ddp", lambda r: relabel(r, recipe="bf16_pure"), RECIPE, "bf16_pure has bfloat16"),
    "an edited recipe with its census": ("fsdp2", lambda r: as_fp32(r, census=True), COLLECTIVES, "gradients in float32"),
    "an edited recipe without its id": (
        "ddp",
        lambda r: r.update(cell={**r["cell"], "recipe": "fp32"}),
        "the id of a cell is the hash of its configuration",
        "has the id",
    ),
    "another configuration ran": (
        "ddp",
        edit("config.optim", lambda optim: {**optim, "lr": 1.0}),
        "the configuration of the launch is that of its cell",
        "optim is",
    ),
    "gradients not reduced": ("ddp", edit("collectives", {}), COLLECTIVES, "0 bytes reduced"),
    "parameters not gathered": ("fsdp2", edit("collectives.all_gather.bytes", 8), COLLECTIVES, "8 bytes gathered"),
    "more reduced than the census has": (
        "ddp",
        edit("collectives.all_reduce.bytes", lambda n: 2 * n),
        "reductions of the census are those of the collectives",
        "by the census",
    ),
    "a smaller headline": (
        "ddp",
        edit("memory.worst.allocated_peak_bytes", lambda n: n // 2),
        WORST,
        "worst allocated",
    ),
    "another rank in the headline": ("ddp", name_another_worst_rank, WORST, "rank 0 is named"),
    "a rank without memory": ("ddp", lambda r: r["memory"]["per_rank"].pop(), "every rank is present", "1 of 2 ranks"),
    "less memory than the state takes": (
        "ddp",
        lambda r: scale_memory(r, 0.25),
        "memory holds parameters, masters and moments",
        "alone take",
    ),
    "a memory limit below the peaks": ("ddp", edit("memory_limit_bytes", 2**20), LIMIT, "limit under which it ran is 1048576"),
    "more parameters than the census has": (
        "fsdp2",
        edit("observed.total_numel", lambda n: n + 1),
        "parameters of the census are those of the policy",
        "are observed",
    ),
    "half of a part of a step": (
        "ddp",
        edit("step_split_s.compute.per_rank.1.0", lambda s: s / 2),
        PARTS,
        "rank 1: step 0 took",
    ),
    "parts beyond the step": ("ddp", edit("step_split_s.core_wait.per_rank.0.1", 9.0), PARTS, "rank 0: step 1 took"),
    "a part that is gone": ("ddp", lambda r: r["step_split_s"].pop("rank_wait"), PARTS, "a step has the parts"),
    "a part below zero": ("ddp", move_to_transfer, PARTS, "rank 0: a part is negative"),
    "more than every update arrived": ("ddp", edit("precision.numbers.edq", 2.5), NUMBERS, "edq is 2.5"),
    "updates that were lost and found": ("ddp", edit("precision.numbers.updates_lost", -3.0), NUMBERS, "updates_lost is -3.0"),
    "moments beyond all": ("ddp", edit("precision.numbers.second_moment_stalled", 1.5), NUMBERS, "between 0 and 1"),
    "16-bit masters without a finding": ("ddp", as_bf16_pure, FINDINGS, "steps bfloat16 in the census, and no finding BXP101"),
    "16-bit moments without a finding": ("ddp", as_bf16_pure, FINDINGS, "no finding BXP201 or BXP202"),
    "device memory on a CPU": ("ddp", edit("memory.source", "torch.cuda"), "memory is measured where the device says", "cpu"),
    "a NaN loss beside ok": ("ddp", edit("loss.1", None), "loss and gradient norm are finite in every step", "loss of step 1"),
    "an infinite norm beside ok": (
        "ddp",
        edit("grad_norm.2", float("inf")),
        "loss and gradient norm are finite in every step",
        "grad_norm of step 2",
    ),
    "an error beside ok": ("ddp", edit("error", FAILED), "ok means no error", "illegal memory access"),
    "a failure without error": ("ddp", edit("status", "crash"), "nothing is unknown without a reason", "no error says why"),
    "unchecked beside ok": ("ddp", edit("unchecked_reason", "x"), "what is ok was checked against the request", "x"),
    "twice the throughput": ("ddp", edit("throughput.global_samples_per_s", lambda n: 2 * n), THROUGHPUT, "step times give"),
    "a faster rank": ("ddp", edit("throughput.per_rank_samples_per_s.1", lambda n: 2 * n), THROUGHPUT, "rank 1"),
    "a fast rank as the slowest": (
        "ddp",
        edit("step_time_s.slowest", lambda steps: [step / 2 for step in steps]),
        "slowest = maximum over ranks, step by step",
        "is not the maximum",
    ),
    "a step before it began": ("ddp", edit("step_time_s.per_rank.0.0", -0.1), "every step takes time", "took -0.1 s"),
    "phases beyond the step": (
        "ddp",
        edit("phases_s.forward.per_rank.1", lambda steps: [10 * step for step in steps]),
        "phases sum to the step within 2%, on every rank; on a host that may be busy to no more",
        "rank 1",
    ),
    "a launch too short": (
        "ddp",
        edit("duration_s", 0.01),
        "a launch lasts at least as long as its steps",
        "0.010",
    ),
    "a host not observed": (
        "ddp",
        edit("host.hosts.0.window_s", 0.01),
        "the host was observed for as long as the steps took",
        "0.010 s",
    ),
    "FLOPs that nobody computed": (
        "ddp",
        edit("flops.model_flops_per_step", lambda n: 2 * n),
        "FLOPs counted are those of the formula within 1%",
        "by formula",
    ),
    "lost samples": ("ddp", edit("samples.0", 1), "samples = batch x accumulation x ranks x steps", "3 samples"),
    "a lost step": ("ddp", lambda r: r["loss"].pop(), "as many steps as asked for", "2 of 3 steps in loss"),
    "MFU above 1": ("ddp", edit("mfu", 1.33), "MFU and HFU are between 0 and 1, or null", "MFU 1.330"),
    **{
        f"no {key}": ("ddp", edit(key, None), NULLS, f"{key} is null without a reason")
        for key in (
            *("observed", "step_time_s", "phases_s", "step_split_s", "throughput", "memory", "collectives", "flops"),
            *("precision", "samples", "host", "data", "loss", "grad_norm", "environment"),
            *("observed.attention_kernel", "observed.checkpointed_modules"),
            *("flops.model_flops_per_step", "flops.recomputed_flops_per_step", "flops.per_tower"),
        )
    },
    "a shard that is not known": ("ddp", edit("observed.shard_numel.1", None), NULLS, "observed.shard_numel is null"),
    "a peak that is not known": (
        "ddp",
        edit("memory.per_rank.0.allocated_peak_bytes", None),
        NULLS,
        "memory.allocated_peak_bytes is null",
    ),
    "an empty census": ("ddp", edit("precision.census", []), NULLS, "precision.census is empty"),
    "no phases": ("ddp", edit("phases_s", {}), NULLS, "phases_s is empty"),
    "no hosts": ("ddp", edit("host.hosts", []), NULLS, "host.hosts is empty"),
    "no reason for no devices": ("ddp", edit("host.devices_reason", None), NULLS, "host.devices is null"),
    "no cores of a host": ("ddp", edit("host.hosts.0.cores", None), NULLS, "host.hosts.0.cores is null"),
    "samples of one rank": ("ddp", edit("samples", [4]), "every rank is present", "samples has 1 of 2 ranks"),
    "the host of one rank": ("ddp", edit("host.hosts.0.ranks", [0]), "every rank is present", "host has 1 of 2 ranks"),
    "HFU below MFU": ("ddp", lambda r: r.update(mfu=0.5, hfu=0.4), "HFU is not below MFU", "HFU 0.400"),
}
