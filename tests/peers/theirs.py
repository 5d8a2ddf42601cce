"""Take training steps of lerobot's pi0 or pi05 when told to: theirs.py FOLDER VARIANT, see `side.py`.

The folder is that of `tests/parity/scripts/pi.py`. A step is what lerobot's trainer does with one batch in float32: forward,
backward, clip, the optimizer of the policy's preset, and clearing the gradients.
"""

import importlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "parity" / "scripts"))

import operators  # noqa: F401
import pi
import torch
from safetensors.torch import load_file

LEARNING_RATE = 1e-4


def main(folder, variant):
    answers, sys.stdout = sys.stdout, sys.stderr  # lerobot prints
    torch.set_num_threads(1)
    request = json.loads((folder / "request.json").read_text())
    name = request["policy"]
    modeling = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    pi.set_sizes(modeling, request)
    policy_class, config_class = getattr(modeling, f"{name.upper()}Policy"), getattr(modeling, f"{name.upper()}Config")
    config = pi.make_config(config_class, request)
    config.optimizer_lr, config.optimizer_weight_decay = LEARNING_RATE, 0.0
    if variant == "eager compiled":
        config.compile_model, config.compile_mode = True, "default"  # its own default tunes for a GPU
    policy = policy_class.from_pretrained(folder / "weights", config=config)
    batch = load_file(folder / "batch.safetensors")
    noise, times = batch.pop("noise"), batch.pop("time")
    policy.model.sample_noise = lambda shape, device: noise
    policy.model.sample_time = lambda size, device: times
    policy.train()
    optimizer = policy.config.get_optimizer_preset().build(list(policy.get_optim_params()))

    def step():
        marks = [time.perf_counter()]
        loss, _ = policy.forward(batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optimizer_grad_clip_norm)
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        return loss.detach(), marks

    first, _ = step()
    print(json.dumps({"torch": torch.__version__, "losses": [float(first)]}), file=answers, flush=True)
    phases = ("forward", "backward", "clip", "optimizer", "zero_grad")
    for line in sys.stdin:
        taken = [step() for _ in range(int(line))]
        record = {
            "step_s": [marks[-1] - marks[0] for _, marks in taken],
            "phases_s": {phase: [marks[i + 1] - marks[i] for _, marks in taken] for i, phase in enumerate(phases)},
            "losses": [float(loss) for loss, _ in taken],
        }
        print(json.dumps(record), file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
