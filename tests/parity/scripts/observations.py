"""Batches of lerobot's policies, by the adapter and by lerobot itself, and the actions after them: observations.py FOLDER.

Needs benchbox by PYTHONPATH. FOLDER has `request.json`. Written are a dataset, `dataset`, whose images are in its tables, and
`<policy>.safetensors` for each policy: `adapter.<name>` is an entry of the batch that the adapter gives to it in training,
`lerobot.<name>` that of lerobot's dataset and normalisation, and `acted` are its actions (B, N, A) when its network returns the
chunk that it was trained on. `alone` are its actions (1, N, A) for the last sample, and `beside` those beside the others.
ACT has two more: `evaluated`, a loss in evaluation mode, and `distances` (B, N, A) of its actions from the recorded ones.
"""

import json
import sys
from pathlib import Path

import numpy as np
import operators  # noqa: F401
import torch
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.datasets.factory import IMAGENET_STATS, resolve_delta_timestamps
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.processor import NormalizerProcessorStep
from lerobot.processor.converters import batch_to_transition, transition_to_batch
from safetensors.torch import save_file
from torch.utils.data import default_collate

from benchbox.data.loading.loader import open_samples
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.spec.cell import DataSpec

CAMERAS = [f"observation.images.camera{index}" for index in range(2)]  # in the dataset as the adapter names them
DIMS, PIXELS = 8, 64  # those of the tiny policies


def main(folder):
    request = json.loads((folder / "request.json").read_text())
    write_dataset(folder / "dataset", request["episodes"])
    for name in request["policies"]:
        torch.manual_seed(0)
        policy = build_policy(f"lerobot:{name}", "tiny", Axes(cams=len(CAMERAS), attention="native"))
        samples = open_samples(DataSpec(kind="lerobot", path=str(folder / "dataset")), policy.batch_spec(), seed=0)
        policy.load_statistics(samples.statistics)
        batch = default_collate([samples.sample(0, index) for index in request["indices"]])
        trained = trained_batch(policy, batch)
        tensors = {f"adapter.{key}": value for key, value in trained.items() if torch.is_tensor(value)}
        tensors |= {
            f"lerobot.{key}": value for key, value in own_batch(folder, policy.module.config, request["indices"]).items()
        }
        if name in request["acting"]:
            policy.eval()
            if name == "act":
                tensors |= evaluate_act(policy, batch)
            inputs = {key: batch[key] for key in policy.batch_spec().fields(acting=True)}
            alone = policy({key: tensor[-1:] for key, tensor in inputs.items()}, act=True)
            tensors |= {"alone": alone, "beside": policy(inputs, act=True)[-1:]}
            return_chunk(policy.module, trained["action"])
            tensors["acted"] = policy(inputs, act=True)
        save_file({key: value.detach().clone().contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")


def write_dataset(root, episodes):
    """Write noise, because every frame and dimension then differs from all others."""
    names = ["height", "width", "channels"]
    features = {key: {"dtype": "image", "shape": (PIXELS, PIXELS, 3), "names": names} for key in CAMERAS}
    features |= {key: {"dtype": "float32", "shape": (DIMS,), "names": None} for key in ("observation.state", "action")}
    dataset = LeRobotDataset.create("me/dataset", fps=10, features=features, root=root, use_videos=False)
    random = np.random.default_rng(0)
    for length in episodes:
        for _ in range(length):
            frame = {key: random.normal(size=DIMS).astype(np.float32) for key in ("observation.state", "action")}
            frame |= {key: random.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8) for key in CAMERAS}
            dataset.add_frame(frame | {"task": "push"})
        dataset.save_episode()
    dataset.finalize()


def trained_batch(policy, batch):
    """Return what the policy of lerobot is called with in a training step."""
    batches = []
    hook = policy.module.register_forward_pre_hook(lambda module, args: batches.append(args[0]))
    policy(batch)
    hook.remove()
    return batches[0]


def evaluate_act(policy, batch):
    """Return the loss of ACT in evaluation mode, on the chunks within an episode, and their distances from what it acts."""
    whole = ~batch["action_is_pad"].any(dim=1)
    batch = {key: tensor[whole] for key, tensor in batch.items()}
    inputs = trained_batch(policy, batch)
    return {"evaluated": policy(batch).total, "distances": inputs["action"] - policy.module.predict_action_chunk(inputs)}


def own_batch(folder, config, indices):
    """Return a batch as lerobot reads and normalises it for its training."""
    dataset = LeRobotDataset("me/dataset", root=folder / "dataset")
    windows = resolve_delta_timestamps(config, dataset.meta)
    dataset = LeRobotDataset("me/dataset", root=folder / "dataset", delta_timestamps=windows)
    statistics = {key: dict(values) for key, values in dataset.meta.stats.items()}
    for camera in CAMERAS:
        statistics[camera] |= {name: torch.tensor(values) for name, values in IMAGENET_STATS.items()}
    kinds = {"observation.state": FeatureType.STATE, "action": FeatureType.ACTION} | dict.fromkeys(CAMERAS, FeatureType.VISUAL)
    normalise = NormalizerProcessorStep(
        features={key: PolicyFeature(kind, (1,)) for key, kind in kinds.items()},
        norm_map=config.normalization_mapping,
        stats=statistics,
    )
    batch = default_collate([dataset[index] for index in indices])
    normalised = transition_to_batch(normalise(batch_to_transition(batch)))
    return {key: normalised[key] for key in kinds} | {"action_is_pad": batch["action_is_pad"]}


def return_chunk(module, chunk):
    """Let the network of a policy return a chunk (B, N, A) when it acts."""
    if module.name == "act":
        module.model.forward = lambda batch: (chunk, (None, None))
    elif module.name == "diffusion":
        module.diffusion.conditional_sample = lambda *args, **kwargs: chunk
    else:
        module.model.sample_actions = lambda *args, **kwargs: chunk


if __name__ == "__main__":
    main(Path(sys.argv[1]))
