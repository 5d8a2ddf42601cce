"""Outlines of micro-batches."""

from __future__ import annotations

import pytest
import torch

from benchbox.measure.outlines import BatchOutline, OutlinedBatches

HOST, META = torch.device("cpu"), torch.device("meta")


def whole_batch() -> dict[str, torch.Tensor]:
    return {
        "images": torch.ones(2, 1, 3, 3, 4, 4, dtype=torch.uint8),
        "prompt_mask": torch.tensor([[True, False], [True, True]]),
        "uniform": torch.rand(2, 1),
    }


@pytest.mark.parametrize("device", [HOST, META])
@pytest.mark.parametrize("names", [("images", "prompt_mask", "uniform"), ("images",)])
def test_a_batch_has_the_shapes_of_its_outline_on_the_device_that_is_asked_for(
    names: tuple[str, ...], device: torch.device
) -> None:
    """Also where no field has values that are kept."""
    batch = {name: whole_batch()[name] for name in names}
    drawn = BatchOutline.of(batch).batch(device)
    assert {name: (value.dtype, value.shape, value.device) for name, value in drawn.items()} == {
        name: (value.dtype, value.shape, device) for name, value in batch.items()
    }


def test_masks_and_random_numbers_are_kept_and_images_are_zeros() -> None:
    batch = whole_batch()
    batches = OutlinedBatches([batch])
    assert next(batches) is batch
    (outline,) = batches.outlines
    drawn = outline.batch(HOST)
    assert torch.equal(drawn["prompt_mask"], batch["prompt_mask"])
    assert torch.equal(drawn["uniform"], batch["uniform"])
    assert not drawn["images"].any()
    assert drawn["prompt_mask"].data_ptr() != batch["prompt_mask"].data_ptr(), "the memory of a whole batch would stay"
