"""Micro-batches without the padding that all their samples share."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch

from benchbox.data.loading.loader import open_stream
from benchbox.data.loading.trimming import MULTIPLE, trim
from benchbox.errors import ConfigurationError
from benchbox.registry.contracts import CAMERA_DIMS, CAMERA_MASKS
from tests.support.datasets import write_unequal_robots
from tests.support.policy_batches import make_batch

if TYPE_CHECKING:
    from benchbox.registry.contracts import Batch, BatchSpec
    from benchbox.spec.cell import DataSpec

LENGTH = 4 * MULTIPLE


def text(*ends: int) -> Batch:
    """Return prompts whose valid tokens end here."""
    mask = torch.arange(LENGTH) < torch.tensor(ends)[:, None]
    return {"prompt_tokens": torch.arange(LENGTH).expand(len(ends), -1), "prompt_mask": mask}


def cameras(*present: list[bool]) -> Batch:
    """Return images of which every pixel is the number of its camera; the present ones of each sample."""
    mask = torch.tensor(present)[:, None]  # (B, 1, C)
    numbers = torch.arange(mask.shape[2], dtype=torch.uint8)
    return {"images": numbers[None, None, :, None, None, None].expand(len(present), 1, -1, 3, 2, 2), "image_mask": mask}


@pytest.mark.parametrize(
    ("ends", "length"),
    [
        ((3, 1), MULTIPLE),
        ((MULTIPLE, 2), MULTIPLE),
        ((2, MULTIPLE + 1), 2 * MULTIPLE),
        ((LENGTH, 1), LENGTH),
        ((0, 0), MULTIPLE),
    ],
)
def test_a_text_is_cut_to_the_longest_of_the_batch_rounded_up(ends: tuple[int, ...], length: int) -> None:
    batch = text(*ends)
    (trimmed,) = trim([batch], ["prompt"])
    assert torch.equal(trimmed["prompt_tokens"], batch["prompt_tokens"][:, :length])
    assert torch.equal(trimmed["prompt_mask"], batch["prompt_mask"][:, :length])


def test_a_text_is_never_longer_than_it_was() -> None:
    batch = {name: value[:, :10] for name, value in text(10, 3).items()}
    assert trim([batch], ["prompt"])[0]["prompt_mask"].shape == (2, 10)


def test_a_text_with_padding_at_its_beginning_keeps_its_end() -> None:
    batch = text(0)
    batch["prompt_mask"][:, -1] = True
    assert trim([batch], ["prompt"])[0]["prompt_mask"].shape == (1, LENGTH)


def test_parts_of_one_batch_are_cut_alike() -> None:
    trimmed = trim([text(3), text(MULTIPLE + 3)], ["prompt"])
    assert [part["prompt_mask"].shape for part in trimmed] == [(1, 2 * MULTIPLE)] * 2


def test_cameras_that_no_sample_has_are_left_out_and_the_others_keep_their_order() -> None:
    batch = cameras([False, True, False, False], [False, False, False, True])
    (trimmed,) = trim([batch], ["cameras"])
    assert trimmed["images"][0, 0, :, 0, 0, 0].tolist() == [1, 3]
    assert trimmed["image_mask"].tolist() == [[[True, False]], [[False, True]]]


def test_a_camera_stays_if_it_was_there_in_a_past_frame_or_will_be_in_the_subgoal() -> None:
    mask = torch.zeros(1, 2, 4, dtype=torch.bool)
    mask[0, 0, 1] = True
    subgoal = torch.tensor([[False, False, True, False]])
    batch = {"image_mask": mask, "subgoal_mask": subgoal, "subgoal_images": torch.arange(4)[None, :, None, None, None]}
    (trimmed,) = trim([batch], ["cameras"])
    assert trimmed["image_mask"].shape == (1, 2, 2)
    assert trimmed["subgoal_mask"].tolist() == [[False, True]]
    assert trimmed["subgoal_images"].flatten().tolist() == [1, 2]


def test_one_camera_stays_where_no_sample_has_any() -> None:
    (trimmed,) = trim([cameras([False, False, False])], ["cameras"])
    assert trimmed["images"].shape[2] == 1


def test_only_what_the_policy_declares_is_cut() -> None:
    batch = text(3) | cameras([True, False])
    (trimmed,) = trim([batch], ["prompt"])
    assert trimmed["images"].shape[2] == 2
    assert trim([batch], ["cameras"])[0]["prompt_mask"].shape == (1, LENGTH)
    assert trim([batch], ()) == [batch]


def test_a_part_without_a_mask_is_real_and_nothing_of_the_micro_batch_is_cut() -> None:
    """A camera and a text without a mask, in all parts of a micro-batch or in one, may be needed to their ends."""
    masked = text(3) | cameras([True, False])
    bare = {name: values for name, values in masked.items() if not name.endswith("_mask")}
    for parts in ([bare], [masked, bare], [bare, masked]):
        for part, trimmed in zip(parts, trim(parts, ("cameras", "prompt")), strict=True):
            assert trimmed.keys() == part.keys()
            assert all(torch.equal(trimmed[name], values) for name, values in part.items())
    subgoal = cameras([True, False]) | {"subgoal_images": torch.zeros(1, 2, 3, 2, 2)}
    assert trim([subgoal], ["cameras"])[0]["images"].shape[2] == 2


def test_samples_without_cameras_or_texts_stay_as_they_are() -> None:
    empty = {"images": torch.zeros(2, 1, 0, 3, 2, 2), "image_mask": torch.zeros(2, 1, 0, dtype=torch.bool)}
    (trimmed,) = trim([empty], ("cameras", "prompt"))
    assert trimmed["images"].shape == (2, 1, 0, 3, 2, 2)
    assert trim([], ("cameras", "prompt")) == []
    (trimmed,) = trim([text(3)], ("cameras", "prompt"))
    assert trimmed["prompt_mask"].shape == (1, MULTIPLE)


def test_every_key_with_a_column_for_each_camera_is_cut(bare_spec: BatchSpec) -> None:
    """With a number of cameras that no other dimension has, the columns of a batch are found by their size."""
    spec = replace(bare_spec, cameras=29, history=2, subgoal=True, future=2)
    batch = make_batch(spec, 2)
    for mask in CAMERA_MASKS.values():
        batch[mask][..., 5:] = False
    (trimmed,) = trim([batch], ["cameras"])
    columns = {name: values.shape.index(29) for name, values in batch.items() if 29 in values.shape}
    assert columns == CAMERA_DIMS
    assert {name: trimmed[name].shape[dim] for name, dim in columns.items()} == dict.fromkeys(columns, 5)


def test_a_policy_with_latents_cannot_declare_its_cameras_because_they_would_not_be_cut(bare_spec: BatchSpec) -> None:
    with pytest.raises(ConfigurationError, match=r"BatchSpec\.trimmable: has cameras, and latent_shape does not say which"):
        replace(bare_spec, latent_shape=(2, 3), trimmable=("cameras",))
    assert replace(bare_spec, latent_shape=(2, 3), trimmable=("prompt",)).trimmable == ("prompt",)


@pytest.fixture(scope="module")
def robots(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    return write_unequal_robots(tmp_path_factory.mktemp("robots"))


@pytest.mark.parametrize("order", ["frame_shuffle", "episode_shuffle", "sequential"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_yields_the_samples_of_the_whole_batches_in_contiguous_fields(
    bare_spec: BatchSpec, robots: DataSpec, order: str, workers: int
) -> None:
    spec = replace(bare_spec, cameras=3, state_in_prompt=False)
    data = replace(robots, workers=workers, block=4, buffer=16)
    streams = [
        open_stream(data, spec, batch=2, accumulation=1, rank=0, world_size=1, seed=0, order=order, trimmable=trimmable)
        for trimmable in ((), ("cameras", "prompt"))
    ]
    shapes = set()
    try:
        for whole, trimmed in islice(zip(*streams, strict=True), 48):
            (expected,) = trim([whole], ("cameras", "prompt"))
            assert trimmed.keys() == whole.keys()
            assert all(torch.equal(trimmed[name], values) for name, values in expected.items())
            assert all(values.is_contiguous() for values in trimmed.values())
            assert whole["images"].shape[2] == 3
            shapes.add((trimmed["images"].shape[2], trimmed["prompt_mask"].shape[1]))
    finally:
        for stream in streams:
            stream.close()
    assert len(shapes) > 1, "all batches have the same shapes"
    assert max(cams for cams, _ in shapes) == 2
