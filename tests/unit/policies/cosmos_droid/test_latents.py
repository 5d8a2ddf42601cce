"""The stand-in for a video tokenizer."""

from __future__ import annotations

import pytest
import torch
from benchbox_policies.cosmos_droid.latents import PATCH, TOKEN_DIM, encode, grid_positions, patchify

from benchbox.data.dataset.frame_images import letterbox
from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.sample import sample_path


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def matrix() -> torch.Tensor:
    """Return the matrix of the encoder for five frames of one latent square, without offset: (2 * 48, 5 * 3 * 16 * 16)."""
    pixels = torch.eye(5 * 3 * 16 * 16).view(-1, 5, 1, 3, 16, 16)
    return (encode(pixels) - encode(torch.zeros(1, 5, 1, 3, 16, 16))).flatten(1).T


def test_it_is_orthonormal_but_for_a_constant_of_each_frame():
    """Coefficients of uncorrelated pixels are uncorrelated, in the first frame and in the four after it."""
    rows = matrix()
    gram = rows @ rows.T
    sizes = gram.diagonal()
    torch.testing.assert_close(gram, sizes.diag(), rtol=0, atol=1e-9)
    for half in sizes.view(2, 48):
        torch.testing.assert_close(half, half[:1].expand(48), rtol=1e-5, atol=0)


def test_decoded_latents_encode_to_themselves():
    """The transpose of an orthonormal transform is its inverse on its coefficients."""
    rows = matrix()
    back = rows.T / rows.square().sum(dim=1)
    video = noise(1, 5, 1, 3, 16, 16)
    offset = encode(torch.zeros_like(video))
    latents = encode(video)
    decoded = (back @ (latents - offset).flatten()).view(video.shape)
    torch.testing.assert_close(encode(decoded), latents, rtol=0, atol=1e-5)
    squares = decoded.unflatten(-1, (4, 4)).unflatten(-3, (4, 4))  # (..., 4, 4 pixels, 4, 4 pixels)
    torch.testing.assert_close(squares.std(dim=(-1, -3)), torch.zeros(1, 5, 1, 3, 4, 4), rtol=0, atol=1e-3)


def test_latents_do_not_depend_on_later_frames_or_different_cameras():
    video = noise(1, 9, 2, 3, 32, 48)
    latents = encode(video)
    assert latents.shape == (1, 3, 2, 48, 2, 3)
    for frame, latent in ((1, 1), (5, 2)):
        changed = video.clone()
        changed[:, frame:] = noise(1, 9 - frame, 2, 3, 32, 48)
        assert torch.equal(encode(changed)[:, :latent], latents[:, :latent])
        assert not torch.equal(encode(changed)[:, latent:], latents[:, latent:])
    changed = video.clone()
    changed[:, :, 1] = noise(1, 9, 3, 32, 48)
    assert torch.equal(encode(changed)[:, :, 0], latents[:, :, 0])
    assert torch.equal(encode(video[:, :1]), latents[:, :1]), "the current frame needs no future"


def test_latents_of_recorded_videos_have_about_unit_variance():
    dataset = open_dataset(sample_path())
    frames = [letterbox(dataset.image(camera, frame), (64, 96)) for camera in dataset.cameras for frame in (0, 50, 100, 150)]
    assert 0.5 < encode(torch.stack(frames)[:, None, None]).std() < 2.0


def test_a_token_has_the_position_of_its_pixels():
    """One square of 32 x 32 pixels is bright at a time."""
    shape = (3, 2, 2, 3)  # latent frames, cameras, rows, columns
    positions = grid_positions(shape, torch.device("cpu"))
    dark = torch.zeros(1, 9, 2, 3, 64, 96)
    for frame, camera, row, column in [(0, 0, 0, 0), (1, 0, 1, 2), (4, 1, 0, 1), (8, 1, 1, 2)]:
        video = dark.clone()
        side = 16 * PATCH
        video[:, frame, camera, :, side * row : side * (row + 1), side * column : side * (column + 1)] = 255.0
        changed = (patchify(encode(video)) != patchify(encode(dark)))[0].all(dim=1)
        assert positions[changed].tolist() == [[-(-frame // 4) * 4, row, 3 * camera + column]]
    assert len(positions) == len(changed) == 36
    assert len({tuple(position) for position in positions.tolist()}) == 36


def test_tokens_contain_every_number_of_the_latents():
    latents = torch.randn(2, 3, 2, 48, 4, 6)
    tokens = patchify(latents)
    assert tokens.shape == (2, 36, TOKEN_DIM)
    assert torch.equal(tokens.flatten().sort().values, latents.flatten().sort().values)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_latents_are_float32_for_any_default_dtype(kind):
    torch.set_default_dtype(kind)
    try:
        assert encode(noise(1, 5, 1, 3, 16, 16)).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
