"""Take training steps of lerobot's pi0 or pi05 when told to: theirs.py FOLDER VARIANT, see `side.py`.

The folder is that of `tests/parity/scripts/pi.py`. A step is what lerobot's trainer does with one batch: forward, backward,
clip, the optimizer of the policy's preset, and clearing the gradients. `--precision` is what it is trained in:

- float32: everything.
- bfloat16: the policy's `dtype`, for which the trainer enters autocast by accelerate. Vision tower and norms stay in float32.
- autocast: parameters in float32 under the same autocast, which was lerobot's way before its policies had a `dtype`.
"""

import argparse
import contextlib
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parity" / "scripts"))
sys.path.append(str(Path(__file__).parents[2]))  # benchbox.measure

import operators  # noqa: F401
import pi
import torch
from safetensors.torch import load_file
from turns import LEARNING_RATE, answer_turns, optim_in_force

from benchbox.measure.memory import release_cached_memory

COMPILATION_BYTES = 4 * 2**30  # for the matrix products that Inductor times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("variant", choices=("eager", "eager compiled"))
    parser.add_argument("--precision", choices=("float32", "bfloat16", "autocast"), default="float32")
    parser.add_argument(
        "--waits",
        action="store_true",
        help="use no GPU before a line of standard input has come, and no memory for steps before a second one, if compiled",
    )
    arguments = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # lerobot prints
    if arguments.waits:
        importlib.import_module("lerobot.policies.pi05.modeling_pi05")  # takes many seconds
        sys.stdin.readline()
    device = torch.device("cuda", 0) if arguments.waits and torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    policy, config = load_policy(arguments, device)
    batch = {key: tensor.to(device) for key, tensor in load_file(arguments.folder / "batch.safetensors").items()}
    noise, times = batch.pop("noise"), batch.pop("time")
    policy.model.sample_noise = lambda shape, device: noise
    policy.model.sample_time = lambda size, device: times
    policy.train()
    release_cached_memory(device)
    optimizer = policy.config.get_optimizer_preset().build(list(policy.get_optim_params()))
    optim = optim_in_force(optimizer.param_groups, config.optimizer_grad_clip_norm)
    autocast, backward, clip = contextlib.nullcontext, torch.Tensor.backward, torch.nn.utils.clip_grad_norm_
    if arguments.precision != "float32":
        accelerator = build_accelerator(device)
        policy, optimizer = accelerator.prepare(policy, optimizer)
        autocast, backward, clip = accelerator.autocast, accelerator.backward, accelerator.clip_grad_norm_

    def forward():
        with autocast():
            loss, _ = policy.forward(batch)
        return loss

    def step(instrument):
        with instrument.step():
            with instrument.phase("forward"):
                loss = forward()
            with instrument.phase("backward"):
                backward(loss)
            with instrument.phase("clip"):
                norm = clip(policy.parameters(), config.optimizer_grad_clip_norm)
            with instrument.phase("optimizer"):
                optimizer.step()
            with instrument.phase("zero_grad"):
                optimizer.zero_grad()
        norm.item()  # for the trainer's log
        return loss.detach()

    if arguments.waits and config.compile_model:
        compile_ahead(forward, device)
    answer_turns(step, optimizer.zero_grad, device, optim, answers)


def load_policy(arguments, device):
    """Build the policy on the device, with the weights and sizes of the folder."""
    request = json.loads((arguments.folder / "request.json").read_text())
    name = request["policy"]
    modeling = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    pi.set_sizes(modeling, request)
    policy_class, config_class = getattr(modeling, f"{name.upper()}Policy"), getattr(modeling, f"{name.upper()}Config")
    config = pi.make_config(config_class, request)
    config.device = device.type
    config.dtype = "bfloat16" if arguments.precision == "bfloat16" else "float32"
    config.optimizer_lr, config.optimizer_weight_decay = LEARNING_RATE, 0.0
    if arguments.variant == "eager compiled":
        config.compile_model, config.compile_mode = True, "default"  # its own default tunes for minutes
    with device:
        policy = policy_class(config)
    policy.load_state_dict(read_weights(arguments.folder / "weights" / "model.safetensors", policy))
    return policy, config


def read_weights(path, policy):
    """Return weights under the policy's names, as lerobot's `from_pretrained` does, which uses random ones if names differ.

    They do differ with transformers 5.17, which lerobot 0.6.1 does not name as supported: its vision tower has no module
    `vision_model`.
    """
    state = {f"model.{key}": tensor for key, tensor in load_file(path).items()}
    embedding = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    state.setdefault(embedding, state["model.paligemma_with_expert.paligemma.lm_head.weight"])
    if not any(".vision_model." in key for key in policy.state_dict()):
        state = {key.replace(".vision_model.", "."): tensor for key, tensor in state.items()}
    return state


def compile_ahead(forward, device):
    """Compile forward and backward, then wait for a line of standard input.

    Until then the process takes hardly any memory, because others use the GPU while this one compiles, which takes minutes for
    a full policy: its forward pass may only begin.
    """
    torch._functorch.config.force_non_lazy_backward_lowering = True
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        limit = torch.cuda.memory_reserved(device) + COMPILATION_BYTES
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    with contextlib.suppress(Exception):  # it runs out of memory; anything else comes again in the first step
        forward()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    release_cached_memory(device)
    sys.stdin.readline()


def build_accelerator(device):
    """Return what lerobot's trainer prepares policy and optimizer with, and set what it sets beside it."""
    from accelerate import Accelerator

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    return Accelerator(step_scheduler_with_optimizer=False, mixed_precision="bf16", cpu=device.type == "cpu")


if __name__ == "__main__":
    main()
