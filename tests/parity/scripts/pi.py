"""Run lerobot's pi0 or pi05 on weights and a batch of benchbox, and train it for a step: pi.py FOLDER.

FOLDER, or every folder in it, has `request.json`, `batch.safetensors` and `weights/model.safetensors`. Written into it are
`results.safetensors`, `results.json` and the checkpoint `trained/` after the step.
"""

import importlib
import json
import sys
from pathlib import Path

import operators  # noqa: F401
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi_gemma import PaliGemmaForConditionalGenerationWithPiGemma, PiGemmaForCausalLM
from safetensors.torch import load_file, save_file

ACTION, STATE, TOKENS, MASK = (
    "action",
    "observation.state",
    "observation.language.tokens",
    "observation.language.attention_mask",
)


def main(folder):
    for request in sorted(folder.rglob("request.json")):
        run(request.parent)


def run(folder):
    request = json.loads((folder / "request.json").read_text())
    name = request["policy"]
    modeling = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    set_sizes(modeling, request)
    policy_class, config_class = getattr(modeling, f"{name.upper()}Policy"), getattr(modeling, f"{name.upper()}Config")
    config = make_config(config_class, request)
    policy = policy_class.from_pretrained(folder / "weights", config=config)
    batch = load_file(folder / "batch.safetensors")
    noise, time = batch.pop("noise"), batch.pop("time")
    policy.model.sample_noise = lambda shape, device: noise
    policy.model.sample_time = lambda size, device: time

    outputs = {}
    policy.train()
    optimizer = policy.config.get_optimizer_preset().build(list(policy.get_optim_params()))
    elements, velocities = [], []
    forward = policy.model.forward
    policy.model.forward = lambda *args: elements.append(forward(*args)) or elements[-1]
    hook = policy.model.action_out_proj.register_forward_hook(lambda module, inputs, output: velocities.append(output))
    loss, _ = policy.forward(batch)
    hook.remove()
    policy.model.forward = forward
    outputs |= {"loss": loss.detach(), "elements": elements[0].detach(), "velocity": velocities[0].detach()}
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in policy.named_parameters()}
    outputs |= {f"gradient.{key}": gradient.clone() for key, gradient in gradients.items() if gradient is not None}
    outputs["actions"] = policy.predict_action_chunk(batch, noise=noise)

    torch.nn.utils.clip_grad_norm_(policy.parameters(), config.optimizer_grad_clip_norm)
    optimizer.step()
    outputs["trained.actions"] = policy.predict_action_chunk(batch, noise=noise)
    policy.save_pretrained(folder / "trained")
    (factor,) = config.get_scheduler_preset().build(optimizer, config.scheduler_decay_steps).lr_lambdas
    outputs["rates"] = torch.tensor([factor(step) for step in range(0, 40_001, 500)])
    save_file({key: tensor.contiguous() for key, tensor in outputs.items()}, folder / "results.safetensors")
    without_gradient = [key for key, gradient in gradients.items() if gradient is None]
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    (folder / "results.json").write_text(json.dumps({"without_gradient": without_gradient, "weight_decays": decays}))


def set_sizes(modeling, request):
    """Make lerobot, which builds the published sizes only, build others; everything else in it is left as it is."""
    variants = {"gemma_2b": request["backbone"], "gemma_300m": request["expert"]}
    modeling.get_gemma_config = lambda variant: modeling.GemmaConfig(**variants[variant])

    def build_paligemma(config):
        for key, size in request["vision"].items():
            setattr(config.vision_config, key, size)
        config.text_config.vocab_size = request["vocabulary"]
        return PaliGemmaForConditionalGenerationWithPiGemma(config=config)

    def build_expert(config):
        config.vocab_size = request["vocabulary"]
        return PiGemmaForCausalLM(config=config)

    modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM = build_paligemma, build_expert


def make_config(config_class, request):
    cameras = {name: PolicyFeature(FeatureType.VISUAL, (3, *request["image_size"])) for name in request["cameras"]}
    state = {STATE: PolicyFeature(FeatureType.STATE, (request["state_dim"],))}
    return config_class(
        device="cpu",
        input_features=cameras | state,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (request["action_dim"],))},
        image_resolution=tuple(request["image_size"]),
        chunk_size=request["horizon"],
        n_action_steps=request["horizon"],
        num_inference_steps=request["denoising_steps"],
        max_state_dim=request["max_state_dim"],
        max_action_dim=request["max_action_dim"],
        optimizer_lr=1e-3,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
