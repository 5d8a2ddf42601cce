"""Read a dataset with lerobot and prepare samples of it with the processors of its pi0 and pi05: processors.py FOLDER.

FOLDER has `request.json` and a tokenizer in `google/paligemma-3b-pt-224`, the name that lerobot opens. Written into it is
`<policy>.safetensors` for each policy, with every tensor of the samples before and after their processors.
"""

import json
import sys
from pathlib import Path

import operators  # noqa: F401
import pi
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi05 import modeling_pi05
from safetensors.torch import save_file
from torch.utils.data import default_collate

POLICIES = {
    "pi0": (modeling_pi0, modeling_pi0.PI0Policy, modeling_pi0.PI0Config),
    "pi05": (modeling_pi05, modeling_pi05.PI05Policy, modeling_pi05.PI05Config),
}


def main(folder):
    request = json.loads((folder / "request.json").read_text())
    for name, sizes in request["policies"].items():
        modeling, policy_class, config_class = POLICIES[name]
        pi.set_sizes(modeling, sizes)
        dataset = LeRobotDataset(
            "benchbox/sample",
            root=request["dataset"],
            delta_timestamps={pi.ACTION: [step / request["fps"] for step in range(sizes["horizon"])]},
            video_backend="pyav",
        )
        batch = default_collate([dataset[index] for index in request["indices"]])
        outputs = {f"raw.{key}": value for key, value in batch.items() if isinstance(value, torch.Tensor)}
        constant_batch, constant_statistics = make_constant(batch, dataset.meta.stats, request["constant_dim"])
        outputs["constant.value"] = constant_batch[pi.STATE][0, request["constant_dim"]]
        config = make_config(config_class, sizes, sizes["image_sizes"][0])
        for kind, inputs, statistics in (
            ("", batch, dataset.meta.stats),
            ("constant.", constant_batch, constant_statistics),
            ("task.", batch | {"task": [request["task"]] * len(batch["task"])}, dataset.meta.stats),
        ):
            prepare, finish = make_pre_post_processors(config, dataset_stats=statistics)
            prepared = prepare(inputs)
            outputs |= {f"{kind}{key}": value for key, value in prepared.items() if isinstance(value, torch.Tensor)}
            outputs[f"{kind}restored"] = finish(prepared[pi.ACTION])
        for size in sizes["image_sizes"]:
            policy = policy_class(make_config(config_class, sizes, size))
            images, _ = policy._preprocess_images(prepared)
            outputs[f"images.{size}"] = torch.stack(images, dim=1)
        save_file({key: value.clone().contiguous() for key, value in outputs.items()}, folder / f"{name}.safetensors")


def make_constant(batch, statistics, dim):
    """Return a batch and statistics in which one dimension of the state always has its mean."""
    state = {name: torch.as_tensor(values).clone().float() for name, values in statistics[pi.STATE].items()}
    state["std"][dim] = 0.0
    state["q01"][dim] = state["q99"][dim] = state["mean"][dim]
    values = batch[pi.STATE].clone()
    values[:, dim] = state["mean"][dim]
    return batch | {pi.STATE: values}, statistics | {pi.STATE: state}


def make_config(config_class, sizes, size):
    config = pi.make_config(config_class, sizes | {"image_size": [size, size]})
    config.tokenizer_max_length = sizes["prompt_tokens"]
    config.input_features = config.input_features | {
        name: PolicyFeature(FeatureType.VISUAL, (3, *sizes["image_size"])) for name in sizes["cameras"]
    }
    return config


if __name__ == "__main__":
    main(Path(sys.argv[1]))
