"""Write annotations into a dataset by lerobot's writer, and the texts that its recipe renders for every frame."""

import json
import sys
from pathlib import Path

import operators  # noqa: F401
from lerobot.annotations.steerable_pipeline.executor import Executor
from lerobot.annotations.steerable_pipeline.reader import iter_episodes
from lerobot.annotations.steerable_pipeline.staging import EpisodeStaging
from lerobot.annotations.steerable_pipeline.writer import LanguageColumnsWriter
from lerobot.configs.recipe import MessageTurn, TrainingRecipe
from lerobot.datasets.language_render import render_sample
from lerobot.datasets.lerobot_dataset import LeRobotDataset

folder = Path(sys.argv[1])
root = folder / "dataset"
rows = json.loads((folder / "annotations.json").read_text())
for episode, annotations in rows.items():
    EpisodeStaging(folder / "staging", int(episode)).write(
        "plan",
        [
            {
                "role": "assistant",
                "content": text,
                "style": style,
                "timestamp": time_s,
                "camera": "observation.images.front" if style == "vqa" else None,
                "tool_calls": None,
            }
            for style, time_s, text in annotations
        ],
    )
LanguageColumnsWriter().write_all(list(iter_episodes(root)), folder / "staging", root)
Executor._ensure_annotation_metadata_in_info(root)

names = ("task", "subtask", "memory")
recipe = TrainingRecipe(
    messages=[MessageTurn("assistant", "|".join(f"${{{name}}}" for name in names), stream="low_level", target=True)]
)
dataset = LeRobotDataset("me/dataset", root=root)
rendered = []
for index in range(len(dataset)):
    row = dataset[index]
    message = render_sample(
        recipe=recipe,
        persistent=row["language_persistent"],
        events=row["language_events"],
        t=float(row["timestamp"]),
        sample_idx=index,
        task=row["task"],
    )
    texts = message["messages"][0]["content"].split("|")
    rendered.append(dict(zip(names, texts, strict=True)))
(folder / "rendered.json").write_text(json.dumps(rendered))
