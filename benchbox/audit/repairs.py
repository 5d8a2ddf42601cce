"""Repairs in the words of the library that trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.observer.facts import RankFacts

# After every repair that lets lost updates arrive: it changes the training.
RETUNE = (
    "then tune the learning rate again: updates that were lost now arrive (AReaL#1634 scored 0.733 at the old rate of 1.7e-5 "
    "after such a repair, and 0.838 at 6e-6)"
)
# For a session of benchbox and for a checkpoint, of which no library is known.
MASTERS = "let the optimizer step float32 masters (recipe bf16_master) or float32 parameters under autocast (fp32_autocast)"

# A library that drives another one comes before it: what its user can change is there.
_LIBRARIES = ("lerobot", "transformers", "lightning", "deepspeed", "accelerate", "fsdp", "torch")

MASTERS_BY_LIBRARY = {
    "lerobot": (
        "create the policy in float32 (--policy.dtype=float32, where the policy has it) and let accelerate compute in "
        "bfloat16: accelerate launch --mixed_precision=bf16"
    ),
    "transformers": (
        "load the model in float32 (from_pretrained(..., dtype=torch.float32)) and set bf16=True in TrainingArguments"
    ),
    "lightning": 'use Trainer(precision="bf16-mixed") in place of "bf16-true", and cast no module yourself',
    "deepspeed": (
        'set "bf16": {"enabled": true} in the DeepSpeed config, without bf16_master_weights_and_grads and '
        "bf16_optimizer_states: its optimizers then step float32 masters"
    ),
    "accelerate": 'pass a float32 model to prepare(), and compute in bfloat16 by Accelerator(mixed_precision="bf16")',
    "fsdp": (
        "shard float32 parameters, and compute in bfloat16 by MixedPrecisionPolicy(param_dtype=torch.bfloat16) in fully_shard, "
        "or MixedPrecision(param_dtype=torch.bfloat16) in FullyShardedDataParallel"
    ),
    "torch": "keep the parameters in float32, and run the forward pass under torch.autocast(device, dtype=torch.bfloat16)",
}

REDUCTION_BY_LIBRARY = {
    "deepspeed": 'set "communication_data_type": "fp32" in the DeepSpeed config',
    "fsdp": "reduce in float32: reduce_dtype=torch.float32 in MixedPrecisionPolicy (fully_shard) or MixedPrecision (FSDP1)",
}
ACCUMULATION_BY_LIBRARY = {
    "deepspeed": 'set "data_types": {"grad_accum_dtype": "fp32"} in the DeepSpeed config',
}
CLIPPING_BY_LIBRARY = {
    "lerobot": "leave clipping to lerobot-train (--optimizer.grad_clip_norm)",
    "transformers": "leave clipping to the Trainer (max_grad_norm in TrainingArguments)",
    "lightning": "leave clipping to the Trainer: gradient_clip_val; under manual optimization call self.clip_gradients",
    "deepspeed": 'leave clipping to DeepSpeed: "gradient_clipping" in its config',
    "accelerate": "clip by accelerator.clip_grad_norm_ before optimizer.step(): it unscales, and knows FSDP and DeepSpeed",
    "torch": (
        "clip the gradients that the optimizer reads, right before optimizer.step(); with a GradScaler, call "
        "scaler.unscale_(optimizer) before clipping"
    ),
}
SCALING_BY_LIBRARY = {
    "transformers": "set bf16=True, or load the model in float32 and set fp16=True, in TrainingArguments",
    "lightning": 'use Trainer(precision="bf16-mixed") or "16-mixed" in place of "16-true"',
    "deepspeed": 'set "bf16": {"enabled": true}, or "fp16": {"enabled": true} with "loss_scale": 0, in the DeepSpeed config',
    "accelerate": 'use mixed_precision="bf16", or "fp16" with a float32 model, and call accelerator.backward(loss)',
}
SCHEDULE_BY_LIBRARY = {
    "transformers": "pass optimizer and schedule together to the Trainer: optimizers=(optimizer, schedule)",
    "lightning": "return optimizer and schedule together from configure_optimizers, the schedule built on that optimizer",
    "deepspeed": "pass the schedule to deepspeed.initialize(lr_scheduler=...), or name it in the DeepSpeed config",
    "accelerate": "build the schedule on the optimizer that is passed to prepare(), and pass both to the same call",
}


def select_repair(repairs: Mapping[str, str], facts: Sequence[RankFacts]) -> str | None:
    """Return the repair for the library that drives the training; None if there is none, or the library is not known."""
    usable = repairs.keys() & set(_libraries(facts))
    return next((repairs[library] for library in _LIBRARIES if library in usable), None)


def _libraries(facts: Sequence[RankFacts]) -> Iterator[str]:
    for rank_facts in facts:
        if rank_facts.source != "command":
            continue
        yield from rank_facts.libraries
        if rank_facts.setup is not None and rank_facts.setup.backend.startswith(("fsdp", "hsdp")):
            yield "fsdp"
        yield "torch"
