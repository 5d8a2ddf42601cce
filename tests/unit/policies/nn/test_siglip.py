"""Space-time attention of the SigLIP vision tower."""

from __future__ import annotations

import math

import pytest
import torch
from benchbox_policies._layers.nn.siglip import Siglip, SiglipConfig, embed_frames
from torch.utils.flop_counter import FlopCounterMode

from benchbox.registry.contracts import Axes

SIZES = {"width": 48, "depth": 5, "heads": 3, "mlp": 96, "image": 32, "patch": 8}


def tower(attention: str = "sdpa", every: int | None = 2) -> Siglip:
    torch.manual_seed(0)
    return Siglip(SiglipConfig(**SIZES, temporal_every=every), Axes(attention=attention))


def video(frames: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, (2, frames, 3, 32, 32), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@torch.no_grad()
def test_a_video_of_one_frame_is_an_image_bit_for_bit():
    image = video(1)
    assert torch.equal(tower()(image), tower(every=None)(image))


def test_it_has_the_parameters_of_the_plain_tower_under_the_same_names():
    plain = tower(every=None).state_dict()
    assert {name: tensor.shape for name, tensor in tower().state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.items()
    }


@torch.no_grad()
def test_attention_over_time_reaches_valid_past_frames_and_only_those():
    pixels, changed = video(3), video(3)
    changed[:, 0] = 255 - changed[:, 0]
    valid = torch.tensor([[True, True, True], [False, True, True]])
    before, after = tower()(pixels, valid), tower()(changed, valid)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert torch.equal(tower()(pixels), tower()(pixels, torch.ones(2, 3, dtype=torch.bool))), "without a mask all is valid"
    assert torch.equal(tower(every=None)(pixels), tower(every=None)(changed)), "a plain tower does not look at it"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_padding_frames_change_nothing(attention):
    """A current frame that is padding itself attends to no other frame."""
    pixels = video(4)
    padded = torch.tensor([[False, False, True, True]]).expand(2, -1)
    torch.testing.assert_close(tower(attention)(pixels, padded), tower(attention)(pixels[:, 2:]), rtol=1e-5, atol=1e-5)
    alone = tower(attention)(pixels[:, -1:])
    torch.testing.assert_close(tower(attention)(pixels, torch.zeros_like(padded)), alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_attention_over_time_is_causal():
    layer = tower().layers[1]
    x, mask = torch.randn(2 * 3, 16, 48), Siglip._temporal_mask(2, 3, None, torch.device("cpu"))
    changed = x.clone().unflatten(0, (2, 3))
    changed[:, 2] = torch.randn(2, 16, 48)
    before, after = (layer(tensor, mask).unflatten(0, (2, 3)) for tensor in (x, changed.flatten(0, 1)))
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2], after[:, 2])


@torch.no_grad()
def test_a_layer_attends_over_time_in_its_values_and_then_over_space():
    """The expected result is written out for each patch and head."""
    layer = tower("eager").layers[1].double()
    x = torch.randn(3, 16, 48, dtype=torch.float64)  # one video
    mask = Siglip._temporal_mask(1, 3, None, torch.device("cpu"))
    normed = layer.attention_norm(x + embed_frames(3, x)).double()
    query, key, value = (part(normed).view(3, 16, 3, 16) for part in (layer.query, layer.key, layer.value))  # T, P, H, D
    over_time = torch.zeros_like(value)
    for t in range(3):
        for patch in range(16):
            for head in range(3):
                weights = (key[: t + 1, patch, head] @ query[t, patch, head] / 4.0).softmax(0)
                over_time[t, patch, head] = weights @ value[: t + 1, patch, head]
    over_space = torch.stack(
        [
            torch.stack(
                [(query[t, :, head] @ key[t, :, head].T / 4.0).softmax(-1) @ over_time[t, :, head] for head in range(3)], dim=1
            )
            for t in range(3)
        ]
    ).flatten(2)
    expected = x + layer.output(over_space)
    expected = expected + layer.down(torch.nn.functional.gelu(layer.up(layer.mlp_norm(expected)), approximate="tanh"))
    torch.testing.assert_close(layer(x, mask), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer(x, mask[:, -1:]), expected[-1:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frames", [2, 6])
@torch.no_grad()
def test_eager_and_sdpa_agree(frames):
    pixels, valid = video(frames), torch.ones(2, frames, dtype=torch.bool)
    valid[1, 0] = False
    torch.testing.assert_close(tower("eager")(pixels, valid), tower("sdpa")(pixels, valid), rtol=1e-5, atol=1e-5)


def test_the_time_embedding_is_zero_for_the_current_frame_and_differs_between_past_frames():
    embedded = embed_frames(4, torch.zeros(8, 1, 48))
    assert embedded.shape == (8, 1, 48)
    assert not embedded[[3, 7]].any()
    assert torch.equal(embedded[:4], embedded[4:])
    assert torch.cdist(embedded[:4, 0], embedded[:4, 0]).fill_diagonal_(1.0).min() > 0.1
    slowest = 2 * math.pi * -2 / 40  # of two frames ago, by the longest period
    torch.testing.assert_close(embedded[1, 0, [23, 47]], torch.tensor([math.sin(slowest), math.cos(slowest) - 1]))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_projection_of_a_layer_that_attends_over_time_learns_from_the_past(attention):
    pixels, gradients = video(3), []
    for valid in (None, torch.tensor([[False, False, True]]).expand(2, -1)):
        encoder = tower(attention)
        encoder(pixels, valid).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in encoder.named_parameters() if "layers." in name})
    for name in (f"layers.{layer}.{part}.weight" for layer in (1, 3) for part in ("query", "key", "value", "output")):
        with_past, without_past = (by_name[name] for by_name in gradients)
        assert with_past.any(), name
        assert not torch.allclose(with_past, without_past), name


@torch.no_grad()
def test_pictures_of_448_pixels_have_1024_tokens():
    sizes = {"width": 16, "depth": 2, "heads": 2, "mlp": 16, "image": 448, "patch": 14}
    encoder = Siglip(SiglipConfig(**sizes, temporal_every=2), Axes())
    assert encoder(torch.zeros(2, 2, 3, 448, 448, dtype=torch.uint8)).shape == (2, 1024, 16)


@torch.no_grad()
def test_stopping_past_frames_early_does_not_change_the_current_frame():
    """Running all frames through all layers gives the current frame the same features."""
    encoder, pixels, valid = tower(), video(4), torch.tensor([[True] * 4, [False, True, True, True]])
    mask = Siglip._temporal_mask(2, 4, valid, torch.device("cpu"))
    x = encoder.patches(pixels.flatten(0, 1) / 127.5 - 1.0).flatten(2).transpose(1, 2) + encoder.position
    for index, layer in enumerate(encoder.layers):
        x = layer(x, mask) if index in encoder.temporal_layers else layer(x)
    everything = encoder.norm(x).unflatten(0, (2, 4))
    torch.testing.assert_close(encoder(pixels, valid), everything[:, -1], rtol=1e-5, atol=1e-5)


def test_past_frames_are_not_computed_after_their_last_use():
    """The last temporal layer computes only keys and values of past frames, and later layers compute nothing of them."""

    def flops(frames: int, every: int | None = 2) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            tower("eager", every)(video(frames))
        return counter.get_total_flops()

    videos, frames, patches, width, mlp = 2, 4, 16, 48, 96
    patch_embedding = 2 * videos * patches * width * 3 * 8 * 8
    attention = 4 * videos * patches**2 * width
    layer = 2 * videos * patches * width * (4 * width + 2 * mlp) + attention
    assert flops(1) == patch_embedding + 5 * layer
    keys_and_values = 2 * videos * patches * width * 2 * width
    over_time = 4 * videos * patches * width * frames * frames + 4 * videos * patches * width * frames
    past = 3 * (patch_embedding + 3 * layer + keys_and_values)
    assert flops(frames) == patch_embedding + 5 * layer + past + over_time
    assert flops(frames, every=None) == flops(1)
