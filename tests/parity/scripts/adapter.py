"""Losses and sizes of the policies that benchbox's adapter builds from lerobot: adapter.py FOLDER.

Needs benchbox by PYTHONPATH. FOLDER has `request.json`, and `batch.safetensors` and `weights/model.safetensors` in a folder for
each policy of which it has a preset. Written is `results.safetensors`: `<name>.loss` for those, `<name>.adapter` and
`<name>.lerobot` for the tiny ones, `<name>.acted` for those that act, and `<name>.numel` for the published ones.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import operators  # noqa: F401
import torch
from lerobot.processor import tokenizer_processor
from safetensors.torch import load_file, save_file

from benchbox.data.text.prompt import BOS
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import PACKAGE, build_policy
from tests.support.policy_batches import make_batch


def main(folder):
    request = json.loads((folder / "request.json").read_text())
    axes = Axes(cams=request["cameras"], attention="native")
    results = {}
    for name in ("pi0_fast", "smolvla"):
        policy = build_policy(f"lerobot:{name}", "tiny", axes)
        batch = make_batch(policy.batch_spec(), 3)
        batch["action_dim_mask"] = torch.ones_like(
            batch["action_dim_mask"]
        )  # lerobot's policies are built for the dimensions of one dataset
        results[f"{name}.adapter"] = policy(batch).total.detach()
        results[f"{name}.lerobot"] = own_loss(name, policy, batch).detach()
    results["pi0_fast.tokens"] = torch.stack(action_tokens(build_policy("lerobot:pi0_fast", "tiny", axes)))
    for name in ("pi0", "pi05", "smolvla"):
        results[f"{name}.acted"] = actions_beside_two_images(build_policy(f"lerobot:{name}", "tiny", axes))
    for name, preset in request["presets"].items():
        policy = sys.modules[f"{PACKAGE}._adapters.lerobot.policy"].build({"names": {name: preset}}, axes, name)
        loaded = policy.load_weights(folder / name / "weights")
        assert not loaded.unexpected, loaded.unexpected
        losses = policy(load_file(folder / name / "batch.safetensors"), per_sample=True)
        results[f"{name}.loss"] = losses.per_sample["loss"][0]
    for name in ("pi0", "pi05", "pi0_fast", "smolvla"):
        with torch.device("meta"):
            policy = build_policy(f"lerobot:{name}", "full", axes)
        results[f"{name}.numel"] = torch.tensor(sum(parameter.numel() for parameter in policy.parameters()))
    save_file(results, folder / "results.safetensors")


def action_tokens(policy):
    """Return the tokens of actions that the adapter gives to pi0-FAST, and those of lerobot's processor; -1 where masked."""
    batch = make_batch(policy.batch_spec(), 3)
    batch["prompt_tokens"][:, 0] = BOS  # as prompts of a dataset begin
    (inputs,) = policy._batch(batch)
    config = policy.module.config
    fast = [tokens[mask].tolist() for tokens, mask in zip(batch["fast_tokens"], batch["fast_mask"], strict=True)]
    vocabulary = policy.module.model.paligemma_with_expert.paligemma.config.text_config.vocab_size
    tokenizer = SimpleNamespace(bos_token_id=BOS, vocab_size=vocabulary, encode=lambda text, **_: [])  # without texts
    tokenizer_processor.AutoTokenizer = SimpleNamespace(from_pretrained=lambda *_, **__: tokenizer)
    step = tokenizer_processor.ActionTokenizerProcessorStep(
        action_tokenizer_input_object=lambda index: fast[int(index)],
        max_action_tokens=config.max_action_tokens,
        fast_skip_tokens=config.fast_skip_tokens,
    )
    sides = (inputs["action.tokens"], inputs["action.token_mask"]), step._tokenize_action(torch.arange(len(fast))[:, None])
    return [torch.where(mask, tokens, -1) for tokens, mask in sides]


def actions_beside_two_images(policy):
    """Return the actions (2, B, N, A) for two images of the last camera, which the first sample lacks."""
    batch = make_batch(policy.batch_spec(), 2)
    batch["image_mask"][0, :, -1] = False
    inverted = batch["images"].clone()
    inverted[:, :, -1] = 255 - inverted[:, :, -1]
    return torch.stack([policy.select_actions({**batch, "images": images}) for images in (batch["images"], inverted)])


def own_loss(name, policy, batch):
    """Return the mean of the losses that lerobot's own `forward` returns."""
    (inputs,) = policy._batch(policy._normalise(batch))
    own_class = type(policy.module).__mro__[1]
    if name == "pi0_fast":
        return own_class.forward(policy.module, inputs)[0]
    return own_class.forward(policy.module, inputs, inputs["noise"], inputs["time"], reduction="none")[0].mean()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
