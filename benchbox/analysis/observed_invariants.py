"""Invariants of what ran: observed, census and collectives agree with the cell, and the cell with its id."""

from __future__ import annotations

from collections import defaultdict
from math import isclose
from typing import TYPE_CHECKING, NamedTuple

from benchbox.analysis.invariant import Invariant, is_partly_frozen
from benchbox.analysis.plausible_invariants import ITEM_BYTES, WHOLE_PARAMETERS
from benchbox.registry.attention import attention_mismatch
from benchbox.registry.backends import DEFAULT_SHARD_SIZE, backends
from benchbox.registry.launch_record import device_type
from benchbox.registry.padding import padding_mismatch
from benchbox.registry.recipes import BUILT_IN_RECIPES
from benchbox.spec.cell import Cell

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchbox.registry.backends import BackendInfo
    from benchbox.registry.launch_record import CellDict, CensusRecord, CollectiveRecord, LaunchRecord, ObservedRecord

PADDING = 0.01  # of a flat partition, to a multiple of ranks and of alignment
_SIXTEEN_BIT = {"bfloat16", "float16"}
_ROUNDED = 1e-4  # figures of findings have four decimal places
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
_GATHERS = ("all_gather", "broadcast")


class _Traits(NamedTuple):
    """Marks by which a record shows one of the built-in backends."""

    sharding: str | None  # start of `observed.sharding`
    gathers: bool = False  # parameters, in every step
    model: str = ""  # part of the class of the wrapped model


_BACKENDS = {
    "single": _Traits(None),
    "ddp": _Traits("replicated", model="DistributedDataParallel"),
    "fsdp1_full": _Traits("FULL_SHARD in", gathers=True, model="FullyShardedDataParallel"),
    "fsdp1_grad_op": _Traits("SHARD_GRAD_OP in", gathers=True, model="FullyShardedDataParallel"),
    "fsdp1_hybrid": _Traits("HYBRID_SHARD ", gathers=True, model="FullyShardedDataParallel"),
    "fsdp1_hybrid_grad_op": _Traits("_HYBRID_SHARD_ZERO2 ", gathers=True, model="FullyShardedDataParallel"),
    "fsdp2": _Traits("S", gathers=True, model="FSDP"),
    "hsdp": _Traits("R", gathers=True, model="FSDP"),
    "zero1": _Traits("optimizer state partitioned", gathers=True, model="DeepSpeedEngine"),
    "zero2": _Traits("gradients and optimizer state partitioned", gathers=True, model="DeepSpeedEngine"),
    "zero3": _Traits("parameters, gradients and optimizer state partitioned", gathers=True, model="DeepSpeedEngine"),
}


def _observed(record: LaunchRecord) -> ObservedRecord | None:
    return record["observed"] if record["status"] == "ok" else None


def _trainable(observed: ObservedRecord) -> int:
    return observed.get("trainable_numel", observed["total_numel"])  # all of them in records without the key


def _cell_id(record: LaunchRecord) -> Iterable[str] | None:
    expected = Cell.from_dict(dict(record["cell"])).cell_id
    return [] if record["cell_id"] == expected else [f"the configuration of cell {record['cell_id']} has the id {expected}"]


def _config(record: LaunchRecord) -> Iterable[str] | None:
    cell, config = record["cell"], record["config"]
    names = [name for name in {**cell, **config} if cell.get(name) != config.get(name)]
    return [f"{name} is {cell.get(name)!r} in the cell and {config.get(name)!r} in the configuration" for name in names]


def _backend(record: LaunchRecord) -> Iterable[str] | None:
    observed, cell = _observed(record), record["cell"]
    if observed is None:
        return None
    if observed["backend"] != cell["backend"]:
        return [f"observed {observed['backend']}, requested {cell['backend']}"]
    traits, messages = _BACKENDS.get(cell["backend"]), []
    if traits is not None:
        if not (observed["sharding"] or "").startswith(traits.sharding or "") or (observed["sharding"] is None) != (
            traits.sharding is None
        ):
            messages.append(f"{cell['backend']} has no sharding {observed['sharding']!r}")
        if traits.model not in observed["model_class"]:
            messages.append(f"{cell['backend']} does not wrap a model in {observed['model_class']}")
        is_zero = any(name.startswith("DeepSpeed") for name in observed["optimizer_chain"])
        if is_zero != cell["backend"].startswith("zero"):
            messages.append(f"{cell['backend']} does not step {' > '.join(observed['optimizer_chain'])}")
    return messages


def _possible(record: LaunchRecord) -> Iterable[str] | None:
    cell = record["cell"]
    info = backends().get(cell["backend"])
    if record["status"] != "ok" or info is None:
        return None
    messages = [info.ranks_refusal(cell["world_size"], cell.get("shard_size"))]
    if cell["checkpointing"] and not info.checkpointing:
        messages.append(f"{info.name} refuses activation checkpointing")
    if (mode := cell.get("compile", "off")) not in info.compile_modes:
        messages.append(f"{info.name} refuses compile: {mode}")
    recipe = BUILT_IN_RECIPES.get(cell["recipe"])
    if recipe is not None and not info.supports_recipe(recipe):
        messages.append(f"{info.name} has no recipe {recipe.name}")
    return [message for message in messages if message]


def _attention(record: LaunchRecord) -> Iterable[str] | None:
    observed = _observed(record)
    if observed is None or observed["attention_kernel"] is None:
        return None
    kernels, sites = set(observed["attention_kernel"].split("+")), observed.get("attention_sites") or {}
    mismatch = attention_mismatch(record["cell"]["attention"], sorted(kernels), sites)
    messages = [mismatch] if mismatch else []
    called = {kernel for names in sites.values() for kernel in names}
    if called and called != kernels:
        messages.append(f"observed {'+'.join(sorted(kernels))}, and the call sites ran {'+'.join(sorted(called))}")
    return messages


def _checkpointing(record: LaunchRecord) -> Iterable[str] | None:
    observed, flops = _observed(record), record["flops"]
    modules = observed["checkpointed_modules"] if observed else None
    if modules is None:
        return None
    requested = record["cell"]["checkpointing"]
    if bool(modules) != requested:
        return [f"requested {'on' if requested else 'off'}, observed {modules} modules that ran twice"]
    if requested and flops and flops.get("recomputed_flops_per_step") == 0:
        return [f"{modules} modules ran twice, and nothing was recomputed"]
    return []


def _micro_batches(record: LaunchRecord) -> Iterable[str] | None:
    observed, cell = _observed(record), record["cell"]
    if observed is None or "micro_batch_sizes" not in observed:
        return None
    ranks = observed["micro_batch_sizes"]
    messages = [f"sizes on {len(ranks)} of {cell['world_size']} ranks"] if len(ranks) != cell["world_size"] else []
    if len({tuple((part, size["spec"]) for part, size in sizes.items()) for sizes in ranks if sizes}) > 1:
        messages.append("ranks differ in the parts and sizes of the policy's spec")
    mismatches = [padding_mismatch(cell.get("padding", "full"), sizes or {}) for sizes in ranks]
    return messages + [f"rank {rank}: {mismatch}" for rank, mismatch in enumerate(mismatches) if mismatch]


def _compilation(record: LaunchRecord) -> Iterable[str] | None:
    mode, compilation = record["cell"].get("compile", "off"), record.get("compilation")
    if record["status"] != "ok":
        return None
    graphs = [rank["graphs"] for rank in compilation["per_rank"]] if compilation else []
    if mode == "off":  # some functions are compiled all the same: FlexAttention on a GPU, or those that a policy compiles
        return []
    if len(graphs) == record["cell"]["world_size"] and all(graphs):
        return []
    return [f"requested {mode}, observed {graphs or 'no'} graphs by rank"]


def _copies(cell: CellDict, info: BackendInfo) -> int:
    """Return how often the ranks together hold what a backend shards."""
    return cell["world_size"] // (cell.get("shard_size") or DEFAULT_SHARD_SIZE) if info.hybrid else 1


def _shards(record: LaunchRecord) -> Iterable[str] | None:
    observed, cell = _observed(record), record["cell"]
    info = backends().get(cell["backend"])
    if observed is None or cell["backend"] not in _BACKENDS or info is None or None in observed["shard_numel"]:
        return None
    trainable, shards = _trainable(observed), [shard for shard in observed["shard_numel"] if shard is not None]
    messages = []
    if trainable > observed["total_numel"]:
        messages.append(f"{trainable} elements train, of {observed['total_numel']}")
    if cell.get("freeze", "full") != "full" and trainable == observed["total_numel"]:  # a policy may freeze parts by itself
        messages.append(f"freeze {cell['freeze']}, and all {trainable} elements train")
    if len(shards) != cell["world_size"]:
        return [*messages, f"shards of {len(shards)} ranks, of {cell['world_size']}"]
    copies = len(shards)
    if info.shards_optimizer:
        copies = _copies(cell, info)
        messages += [f"rank {rank} steps all {trainable} elements" for rank, n in enumerate(shards) if n >= trainable]
    elif set(shards) != {trainable}:
        messages.append(f"every rank steps all {trainable} elements, observed {shards}")
    if not messages and not copies * trainable <= sum(shards) <= (1 + PADDING) * copies * trainable:
        messages.append(f"shards of {sum(shards)} elements together, and {copies} x {trainable} are trained")
    return messages


def _census(record: LaunchRecord) -> dict[int, dict[str, list[CensusRecord]]] | None:
    """Return the census by rank and kind; None where the launch is not ok or was not audited completely."""
    precision = record["precision"]
    if record["status"] != "ok" or not precision or not precision["census"] or precision.get("problems"):
        return None
    by_rank: dict[int, dict[str, list[CensusRecord]]] = defaultdict(lambda: defaultdict(list))
    for entry in precision["census"]:
        by_rank[entry["rank"]][entry["kind"]].append(entry)
    return by_rank


def _census_sizes(record: LaunchRecord) -> Iterable[str] | None:
    census, observed = _census(record), record["observed"]
    if census is None or observed is None:
        return None
    messages = []
    if sorted(census) != list(range(record["cell"]["world_size"])):
        messages.append(f"a census of ranks {', '.join(map(str, sorted(census)))}, of {record['cell']['world_size']}")
    for rank, kinds in census.items():
        for entry in (entry for entries in kinds.values() for entry in entries):
            size = ITEM_BYTES.get(entry["dtype"])
            if size is not None and entry["bytes"] != size * entry["elements"]:
                messages.append(f"rank {rank}: {entry['elements']} {entry['dtype']} {entry['kind']} in {entry['bytes']} bytes")
            kind = entry["device"].partition(":")[0]
            # torch keeps step counts on the CPU where no kernel reads them.
            if kind != device_type(observed["device"][rank]) and entry["kind"] != "step":
                messages.append(f"rank {rank}: {entry['kind']} on {entry['device']}, the rank on {observed['device'][rank]}")
        moments = sum(entry["elements"] for entry in kinds.get("exp_avg", ()))
        if moments and moments != observed["shard_numel"][rank] and not is_partly_frozen(record):
            messages.append(f"rank {rank}: {moments} first moments, {observed['shard_numel'][rank]} elements stepped")
    return messages


def _parameters(record: LaunchRecord) -> Iterable[str] | None:
    census, observed, cell = _census(record), record["observed"], record["cell"]
    info = backends().get(cell["backend"])
    # Older records have the trainable elements only, and a census has all.
    if census is None or observed is None or "trainable_numel" not in observed or cell["backend"] not in _BACKENDS or not info:
        return None
    entries = [entry for kinds in census.values() for entry in kinds.get("parameter", ())]
    counted, total = sum(entry["elements"] for entry in entries), observed["total_numel"]
    copies = cell["world_size"] if cell["backend"] in WHOLE_PARAMETERS else _copies(cell, info)
    tensors = sum(entry["tensors"] for entry in entries) // cell["world_size"]  # every rank has a part of each
    padding = tensors * (cell["world_size"] - 1) if cell["backend"] == "zero3" else 0  # to a multiple of the ranks
    if copies * total <= counted <= copies * total + padding:
        return []
    return [f"{counted} elements of parameters in the census of all ranks, and {copies} x {total} are observed"]


def _recipe(record: LaunchRecord) -> Iterable[str] | None:
    census, recipe = _census(record), BUILT_IN_RECIPES.get(record["cell"]["recipe"])
    if census is None or recipe is None or record["cell"]["backend"] not in _BACKENDS:
        return None
    messages = []
    for rank, kinds in census.items():
        dtypes = {kind: {entry["dtype"] for entry in entries} for kind, entries in kinds.items()}
        stepped = "master" if "master" in dtypes else "parameter"
        expected = [] if recipe.stepped is None else [(stepped, recipe.stepped), ("exp_avg", recipe.stepped)]
        expected += [("parameter", recipe.storage)] if stepped == "master" else []
        expected += [("product", recipe.compute)]
        messages += [
            f"rank {rank}: {kind} in {', '.join(sorted(dtypes[kind]))}, and {recipe.name} has {dtype}"
            for kind, dtype in expected
            if kind in dtypes and dtype not in dtypes[kind]
        ]
    return messages


def _numbers(record: LaunchRecord) -> Iterable[str] | None:
    census, precision, recipe = _census(record), record["precision"], BUILT_IN_RECIPES.get(record["cell"]["recipe"])
    if census is None or precision is None:
        return None
    numbers = precision.get("numbers", {})
    bounds = {"updates_lost": 1.0, "second_moment_stalled": 1.0}  # shares
    if recipe is not None and recipe.compensation is None:
        bounds["edq"] = 2.0  # rounded to the nearest, a weight moves by 0 to 2 of its update
    return [
        f"{name} is {value}, and by its definition between 0 and {most:g}"
        for name, most in bounds.items()
        if (value := numbers.get(name)) is not None and not 0 <= value <= most
    ]


def _findings(record: LaunchRecord) -> Iterable[str] | None:
    """Compare the findings with the census, of built-in recipes in which nothing makes up for the rounding of 16 bits."""
    census, precision, recipe = _census(record), record["precision"], BUILT_IN_RECIPES.get(record["cell"]["recipe"])
    if census is None or precision is None or recipe is None or recipe.compensation is not None:
        return None
    dtypes: dict[str, set[str]] = defaultdict(set)
    for entry in (entry for kinds in census.values() for entries in kinds.values() for entry in entries if entry["elements"]):
        dtypes[entry["kind"]].add(entry["dtype"])
    findings = {finding["code"]: finding for finding in precision["findings"]}
    messages = []
    moments = dtypes["exp_avg_sq"] & _SIXTEEN_BIT
    if moments and not findings.keys() & {"BXP201", "BXP202"}:
        messages.append(f"second moments in {', '.join(moments)} in the census, and no finding BXP201 or BXP202")
    stepped = dtypes["master"] or (dtypes["parameter"] if dtypes["exp_avg"] else set())
    if stepped and stepped <= _SIXTEEN_BIT:
        if "BXP101" not in findings:
            messages.append(f"the optimizer steps {', '.join(stepped)} in the census, and no finding BXP101")
        lost, edq = findings.get("BXP102"), precision.get("numbers", {}).get("edq")
        if lost is not None and (edq is None or not isclose(lost["evidence"]["edq"], edq, abs_tol=_ROUNDED)):
            messages.append(f"edq is {edq}, and {lost['evidence']['edq']} in finding BXP102")
    return messages


def _bytes(collectives: Mapping[str, CollectiveRecord], names: Iterable[str]) -> int:
    return sum(collectives[name]["bytes"] for name in names if name in collectives)


def _collectives(record: LaunchRecord) -> Iterable[str] | None:
    observed, collectives, cell = _observed(record), record["collectives"], record["cell"]
    traits, recipe = _BACKENDS.get(cell["backend"]), BUILT_IN_RECIPES.get(cell["recipe"])
    if observed is None or collectives is None or traits is None or recipe is None:
        return None
    if is_partly_frozen(record):
        return None
    if cell["world_size"] == 1:
        return []
    # Gradients and parameters travel in the dtype of live parameters, each at least once in a step.
    least = ITEM_BYTES[recipe.storage] * _trainable(observed)
    messages, reduced, gathered = [], _bytes(collectives, _REDUCTIONS), _bytes(collectives, _GATHERS)
    if reduced < least:
        messages.append(f"{reduced} bytes reduced in a step, and the gradients in {recipe.storage} take {least}")
    if traits.gathers and gathered < least:
        messages.append(f"{gathered} bytes gathered in a step, and {cell['backend']} gathers at least {least}")
    return messages + [
        f"{name}: {calls['count']} calls of {calls['bytes']} bytes" for name, calls in collectives.items() if calls["count"] < 1
    ]


def _reductions(record: LaunchRecord) -> Iterable[str] | None:
    census, collectives = _census(record), record["collectives"]
    if census is None or collectives is None:
        return None
    counted = [sum(entry["bytes"] for entry in kinds.get("reduction", ())) for kinds in census.values()]
    if not any(counted):
        return None
    reduced = _bytes(collectives, _REDUCTIONS)
    if isclose(max(counted), reduced, rel_tol=PADDING, abs_tol=64):
        return []
    return [f"{reduced} bytes reduced by the collectives of a step, {max(counted)} by the census"]


OBSERVED_INVARIANTS = (
    Invariant("the id of a cell is the hash of its configuration", _cell_id),
    Invariant("the configuration of the launch is that of its cell", _config),
    Invariant("the backend observed is the one requested", _backend),
    Invariant("the backend can run such a cell", _possible),
    Invariant("the attention kernel is the one requested, at every call site", _attention),
    Invariant("checkpointing is as requested", _checkpointing),
    Invariant("micro-batches have the sizes that the padding allows", _micro_batches),
    Invariant("compilation is as requested", _compilation),
    Invariant("shards of all ranks add up to what is trained", _shards),
    Invariant("the census has every rank, and the sizes of its shards", _census_sizes),
    Invariant("parameters of the census are those of the policy", _parameters),
    Invariant("the dtypes of the census are those of the recipe", _recipe),
    Invariant("numbers of the audit are possible", _numbers),
    Invariant("16-bit state in the census has its findings", _findings),
    Invariant("collectives carry the gradients, and the parameters that are gathered", _collectives),
    Invariant("reductions of the census are those of the collectives", _reductions),
)
