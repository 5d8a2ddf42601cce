"""Take training steps of lerobot's pi0 or pi05 when told to: theirs.py FOLDER VARIANT, see `side.py`.

The folder is that of `tests/parity/scripts/pi.py`. A step is what lerobot's trainer does with one batch: forward, backward,
clip, the optimizer of the policy's preset, and clearing the gradients. `--precision` is what it is trained in:

- float32: everything.
- bfloat16: the policy's `dtype`, for which the trainer enters autocast by accelerate. Vision tower and norms stay in float32.
- autocast: parameters in float32 under the same autocast, which was lerobot's way before its policies had a `dtype`.
"""

import argparse
import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "parity" / "scripts"), str(ROOT)]

import operators  # noqa: F401
import pi
import torch
from safetensors.torch import load_file
from turns import LEARNING_RATE, answer_turns, optim_in_force


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("variant", choices=("eager", "eager compiled"))
    parser.add_argument("--precision", choices=("float32", "bfloat16", "autocast"), default="float32")
    parser.add_argument("--waits", action="store_true", help="use no GPU before a line of standard input has come")
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
    optimizer = policy.config.get_optimizer_preset().build(list(policy.get_optim_params()))
    optim = optim_in_force(optimizer.param_groups, config.optimizer_grad_clip_norm)
    autocast, backward, clip = nullcontext, torch.Tensor.backward, torch.nn.utils.clip_grad_norm_
    if arguments.precision != "float32":
        accelerator = build_accelerator(device)
        policy, optimizer = accelerator.prepare(policy, optimizer)
        autocast, backward, clip = accelerator.autocast, accelerator.backward, accelerator.clip_grad_norm_

    def step(instrument):
        with instrument.step():
            with instrument.phase("forward"), autocast():
                loss, _ = policy.forward(batch)
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
        return policy_class.from_pretrained(arguments.folder / "weights", config=config), config


def build_accelerator(device):
    """Return what lerobot's trainer prepares policy and optimizer with, and set what it sets beside it."""
    from accelerate import Accelerator

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    return Accelerator(step_scheduler_with_optimizer=False, mixed_precision="bf16", cpu=device.type == "cpu")


if __name__ == "__main__":
    main()
