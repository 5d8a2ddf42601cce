"""Policies that benchbox's adapter builds from lerobot, beside lerobot's own of the same weights: drawn_adapter.py FOLDER.

Needs benchbox by PYTHONPATH. FOLDER has `request.json`, drawings by name. Written is `results.safetensors`, in which
`<name>.ours.<quantity>` and `<name>.theirs.<quantity>` are comparable, and `results.json`: for each drawing, the names of the
`weights` of one seed that differ, and of the `gradients`, and lerobot's `preset`; or why it is `refused`. Both sides have the
same inputs for loss and gradients, because rounding would change the latter: a unit of a ResNet that is near zero lets a
gradient through or not.
"""

import json
import sys
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path

import operators  # noqa: F401
import torch
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.datasets.factory import IMAGENET_STATS
from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep
from lerobot.processor.converters import (
    batch_to_transition,
    policy_action_to_transition,
    transition_to_batch,
    transition_to_policy_action,
)
from safetensors.torch import save_file

from benchbox.errors import UnsupportedError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, build_policy
from tests.support.policy_batches import make_batch

NAMES = {"act": "ACT", "diffusion": "Diffusion", "smolvla": "SmolVLA", "pi0": "PI0", "pi05": "PI05", "pi0_fast": "PI0Fast"}
PI = ("pi0", "pi05", "pi0_fast")
STATE, ACTION, IMAGES = "observation.state", "action", "observation.images"
TOKENS, TOKEN_MASK = "observation.language.tokens", "observation.language.attention_mask"


def main(folder):
    build_policy("lerobot:act", "tiny", Axes(attention="native"))  # makes the adapter importable
    tensors, facts = {}, {}
    for name, drawing in json.loads((folder / "request.json").read_text()).items():
        try:
            ours, theirs, facts[name] = compare(drawing)
        except UnsupportedError as error:
            facts[name] = {"refused": str(error)}
            continue
        for side, quantities in (("ours", ours), ("theirs", theirs)):
            tensors |= {f"{name}.{side}.{key}": tensor.detach().clone().contiguous() for key, tensor in quantities.items()}
    save_file(tensors, folder / "results.safetensors")
    (folder / "results.json").write_text(json.dumps(facts))


def compare(drawing):
    """Return the quantities of the adapted policy, those of lerobot's, and the names of weights and gradients that differ."""
    policy, own = build_ours(drawing), build_theirs(drawing)
    initial, own_initial = policy.module.state_dict(), own.state_dict()
    weights = [key for key in initial.keys() & own_initial.keys() if not torch.equal(initial[key], own_initial[key])]
    weights += initial.keys() ^ own_initial.keys()
    statistics = make_statistics(drawing)
    policy.load_statistics([{key: {name: row.tolist() for name, row in rows.items()} for key, rows in statistics.items()}])
    batch = raw_batch(policy.batch_spec(), drawing, statistics)
    normalise, restore = processors(own.config, statistics)
    processed = normalise(lerobot_batch(own.config, batch, drawing))
    inputs = inputs_of(policy, batch)
    keys = [*cameras(drawing), STATE, ACTION]
    facts = {"preset": preset_of(own.config)}
    ours = {f"inputs.{key}": inputs[key][..., : processed[key].shape[-1]] for key in keys}
    theirs = {f"inputs.{key}": processed[key].view_as(ours[f"inputs.{key}"]) for key in keys}
    ours["loss"], gradients = train(policy.module, lambda: policy(batch).total)
    own_inputs = {key: value for key, value in inputs.items() if key not in missing_cameras(drawing)}
    theirs["loss"], own_gradients = train(own, lambda: own_loss(own, own_inputs))
    own.load_state_dict(policy.module.state_dict())  # with the same running statistics of batch norms
    fields = {key: batch[key] for key in policy.batch_spec().fields(acting=True)}
    facts |= {"weights": weights, "gradients": differing_gradients(gradients, own_gradients)}
    if drawing["policy"] == "pi0_fast":  # it does not act here
        return ours, theirs, facts
    processed = {key: value for key, value in processed.items() if key not in missing_cameras(drawing)}
    acted = [act(policy, own, row(fields, index), row(processed, index)) for index in range(drawing["samples"])]
    ours["actions"], actions = (torch.cat(chunks) for chunks in zip(*acted, strict=True))
    theirs["actions"] = restore(actions)
    ours["actions"] = ours["actions"][:, : actions.shape[1], : actions.shape[2]]
    return ours, theirs, facts


def preset_of(config):
    """Return lerobot's hyperparameters of a policy under the names of benchbox."""
    optimizer, schedule = config.get_optimizer_preset(), config.get_scheduler_preset()
    names = {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay", "grad_clip_norm": "max_grad_norm"}
    preset = {name: getattr(optimizer, key) for key, name in names.items()}
    return preset | {
        "warmup_steps": schedule.num_warmup_steps if schedule else 0,
        "final_lr": getattr(schedule, "decay_lr", 0.0),
    }


def train(module, loss):
    """Return the training loss and the gradients of a policy, with the random numbers of one seed."""
    module.train()
    torch.manual_seed(1)
    total = loss()
    total.backward()
    return total, {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def differing_gradients(ours, theirs):
    """Return the names of the parameters whose gradients differ by more than rounding, or are those of one side alone."""
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    common = ours.keys() & theirs.keys()
    differing = [name for name in common if not torch.allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6 * largest)]
    return [*differing, *(ours.keys() ^ theirs.keys())]


def own_loss(own, inputs):
    """Return the loss of lerobot's policy, in SmolVLA the mean over samples."""
    if own.name in ("pi0", "pi05"):
        own.model.sample_noise, own.model.sample_time = (lambda *_, name=name: inputs[name] for name in ("noise", "time"))
    if own.name != "smolvla":
        return own.forward(inputs)[0]
    return own.forward(inputs, noise=inputs["noise"], time=inputs["time"], reduction="none")[0].mean()


def act(policy, own, batch, processed):
    """Return the chunks (1, N, A) of both policies for one sample, those of lerobot's in network units."""
    policy.eval()
    own.eval()
    noise = batch["noise"][:, 0]
    chunk = policy.select_actions(batch)
    own.reset()
    if own.name == "diffusion":
        torch.manual_seed(noise[0, 0, :1].view(torch.int32).item())  # of the noise between steps, as the adapter draws it
        images = torch.stack([processed[key] for key in own.config.image_features], dim=-4)
        condition = own.diffusion._prepare_global_conditioning(processed | {IMAGES: images})
        return chunk, own.diffusion.conditional_sample(1, global_cond=condition, noise=noise)[:, own.config.n_obs_steps - 1 :]
    if own.name == "act":
        return chunk, own.predict_action_chunk(processed)
    prompt = {TOKENS: batch["prompt_tokens"], TOKEN_MASK: batch["prompt_mask"]}
    return chunk, own.predict_action_chunk(processed | prompt, noise=noise)


def row(batch, index):
    return {key: value[index : index + 1] for key, value in batch.items() if torch.is_tensor(value)}


def inputs_of(policy, batch):
    """Return what the adapter gives to lerobot's policy."""
    inputs = []
    hook = policy.module.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    policy.eval()(batch)
    hook.remove()
    return inputs[0]


def processors(config, statistics):
    """Return lerobot's normalisation of a batch, and of actions the way back."""
    of_images = {name: torch.tensor(values) for name, values in IMAGENET_STATS.items()}
    statistics = statistics | dict.fromkeys(config.image_features, of_images)
    features = {**config.input_features, **config.output_features}
    modes = config.normalization_mapping
    forward = NormalizerProcessorStep(features=features, norm_map=modes, stats=statistics)
    back = UnnormalizerProcessorStep(features=config.output_features, norm_map=modes, stats=statistics)

    def restore(actions):
        return transition_to_policy_action(back(policy_action_to_transition(actions)))

    return lambda batch: transition_to_batch(forward(batch_to_transition(batch))), restore


def settings_of(drawing):
    modes = drawing["config"].get("normalization_mapping")
    mapping = {"normalization_mapping": {key: NormalizationMode[mode] for key, mode in modes.items()}} if modes else {}
    return drawing["config"] | mapping


def build_ours(drawing):
    name, config = drawing["policy"], settings_of(drawing)
    preset = {"pixels": drawing["pixels"], "dims": drawing["dims"]}
    if drawing["sizes"]:
        batch = {"fast_vocab": 512} if name == "pi0_fast" else {}
        preset["names"] = {name: {**preset, "sizes": drawing["sizes"], "config": config, "batch": batch}}
    else:
        preset["names"] = {name: config}
    torch.manual_seed(0)
    return adapter("policy").build(preset, Axes(cams=drawing["cameras"], attention="native"), name)


def adapter(module):
    return sys.modules[f"{PACKAGE}._adapters.lerobot.{module}"]


def build_theirs(drawing):
    name, pixels, dims = drawing["policy"], drawing["pixels"], drawing["dims"]
    substitutes = nullcontext()
    if name == "smolvla":
        settings = {"resize_imgs_with_padding": (pixels, pixels), "max_state_dim": dims, "max_action_dim": dims}
        hub = adapter("smolvla")  # both sides read the sizes from the preset, in the place of the hub
        backbone = import_module("lerobot.policies.smolvla.smolvlm_with_expert")
        substitutes = hub.replaced(backbone, AutoConfig=hub._Sizes(drawing["sizes"]), AutoProcessor=hub._Processor)
    elif name in PI:
        settings = {"image_resolution": (pixels, pixels), "max_state_dim": dims, "max_action_dim": dims}
    else:
        settings = {"pretrained_backbone_weights": None}
    features = {STATE: PolicyFeature(FeatureType.STATE, (real_dims(drawing),))}
    features |= {key: PolicyFeature(FeatureType.VISUAL, (3, pixels, pixels)) for key in cameras(drawing)}
    actions = {ACTION: PolicyFeature(FeatureType.ACTION, (real_dims(drawing),))}
    config_class = getattr(import_module(f"lerobot.policies.{name}.configuration_{name}"), f"{NAMES[name]}Config")
    config = config_class(input_features=features, output_features=actions, device="cpu", **settings, **settings_of(drawing))
    modeling = import_module(f"lerobot.policies.{name}.modeling_{name}")
    if name in PI:
        substitutes = pi_substitutes(modeling, drawing)
    torch.manual_seed(0)
    with substitutes:
        return getattr(modeling, f"{NAMES[name]}Policy")(config)


@contextmanager
def pi_substitutes(modeling, drawing):
    """Let lerobot build the sizes of a drawing, and pi0-FAST without tokenizers from the hub."""
    pi = adapter("pi")
    names = ("AutoProcessor", "AutoTokenizer") if drawing["policy"] == "pi0_fast" else ()
    sizes = pi._other_sizes(modeling, drawing["sizes"], drawing["pixels"])
    with sizes, pi.replaced(modeling, **dict.fromkeys(names, pi._NoTokenizer)):
        yield


def real_dims(drawing):
    return drawing["real_dims"] or drawing["dims"]


def cameras(drawing):
    return [f"{IMAGES}.camera{index}" for index in range(drawing["cameras"])]


def missing_cameras(drawing):
    return [f"{IMAGES}.camera{index}" for index in drawing["missing"]]


def make_statistics(drawing):
    """Return statistics of wide ranges, beside which the term that avoids divisions by zero is rounding."""
    generator = torch.Generator().manual_seed(0)
    shares = {"min": 0.0, "q01": 0.05, "mean": 0.4, "q99": 0.9, "max": 1.0}
    statistics = {}
    for key in (STATE, ACTION):
        low, width = (torch.rand(real_dims(drawing), generator=generator) * 20 + offset for offset in (-10, 10))
        statistics[key] = {name: low + share * width for name, share in shares.items()} | {"std": 0.3 * width}
    return statistics


def raw_batch(spec, drawing, statistics):
    """Return a batch of benchbox in raw units, whose episodes begin within the observations of a sample."""
    size, dims = drawing["samples"], real_dims(drawing)
    batch = make_batch(spec, size)
    for key, name in (("state", STATE), ("action", ACTION)):
        low, high = statistics[name]["min"], statistics[name]["max"]
        batch[key][..., :dims] = low + torch.sigmoid(batch[key][..., :dims]) * (high - low)
        batch[key][..., dims:] = 0.0
    batch["action_dim_mask"] = (torch.arange(drawing["dims"]) < dims).expand(size, -1)
    batch["image_mask"][:] = torch.tensor([index not in drawing["missing"] for index in range(drawing["cameras"])])
    steps = torch.arange(batch["history_mask"].shape[1])
    first = torch.arange(size) % len(steps)
    batch["history_mask"] = steps >= first[:, None]
    if batch["state"].shape[1] == len(steps):
        batch["state"] = batch["state"][torch.arange(size)[:, None], torch.maximum(steps, first[:, None])]
    return batch


def lerobot_batch(config, batch, drawing):
    """Return the batch as lerobot's dataset would."""
    dims, steps = real_dims(drawing), torch.arange(batch["images"].shape[1])
    first = batch["history_mask"].int().argmax(dim=1, keepdim=True)
    images = batch["images"][torch.arange(len(first))[:, None], torch.maximum(steps, first)].float() / 255
    state = batch["state"][..., :dims]
    if config.observation_delta_indices is None:  # no dimension of time
        views, state = {key: images[:, -1, index] for index, key in enumerate(cameras(drawing))}, state[:, -1]
    else:
        views = {key: images[:, :, index] for index, key in enumerate(cameras(drawing))}
    return views | {STATE: state, ACTION: batch["action"][..., :dims], "action_is_pad": batch["action_is_pad"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
