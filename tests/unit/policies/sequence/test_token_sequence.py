from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from benchbox_policies._layers.sequence.token_sequence import Block, TokenSequence, concat_blocks, gather_tokens
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

if TYPE_CHECKING:
    from benchbox_policies._layers.sequence.attention_mask import AttentionMask

LENGTHS = {"image": 3, "prompt": 4, "response": 2, "fast": 3}
VALID = {
    "image": [[1, 1, 1], [0, 0, 0]],
    "prompt": [[1, 1, 0, 0], [1, 1, 1, 1]],
    "response": [[0, 0], [1, 0]],
    "fast": [[1, 1, 1], [1, 0, 0]],
}
ATTENTION = {"image": "bidirectional", "prompt": "continue", "response": "causal", "fast": "causal"}
GROUPS = [1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5, 6]


def example():
    return concat_blocks(
        [
            Block(
                name=name,
                hidden=torch.randn(2, length, 8),
                valid=torch.tensor(VALID[name], dtype=torch.bool),
                attention=ATTENTION[name],
                visible_to_suffix=name != "fast",
            )
            for name, length in LENGTHS.items()
        ]
    )


def test_a_query_attends_to_a_key_whose_group_is_not_later_if_both_are_valid():
    prefix = example()
    valid = torch.cat([torch.tensor(VALID[name], dtype=torch.bool) for name in LENGTHS], dim=1)
    visible = prefix.attention_mask().dense()
    for b in range(2):
        for i in range(12):
            for j in range(12):
                expected = i == j or (GROUPS[j] <= GROUPS[i] and bool(valid[b, i]) and bool(valid[b, j]))
                assert visible[b, i, j] == expected, (b, i, j)


def test_a_bidirectional_block_does_not_attend_to_a_later_one():
    blocks = [
        Block(name=name, hidden=torch.zeros(1, 2, 1), valid=torch.ones(1, 2, dtype=torch.bool), attention="bidirectional")
        for name in ("first", "second")
    ]
    visible = concat_blocks(blocks).attention_mask().dense()[0].int().tolist()
    assert visible == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_padding_takes_no_position():
    positions = example().positions
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7]
    assert positions[1, 3:8].tolist() == [0, 1, 2, 3, 4]


def suffix(*lengths: int) -> TokenSequence:
    return concat_blocks(
        [
            Block(
                name=f"part {index}",
                hidden=torch.zeros(2, length, 8),
                valid=torch.ones(2, length, dtype=torch.bool),
                attention="bidirectional",
            )
            for index, length in enumerate(lengths)
        ]
    )


def test_the_suffix_attends_to_valid_visible_tokens_and_itself_and_its_positions_follow_theirs():
    prefix = example()
    visible = suffix(2).attention_mask_after(prefix).dense()
    assert visible.shape == (2, 2, 14)
    assert visible[0, 0].int().tolist() == visible[0, 1].int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert suffix(2).positions_after(prefix).tolist() == [[5, 6], [5, 6]]


def test_blocks_of_the_suffix_do_not_attend_to_later_blocks():
    visible = suffix(1, 2).attention_mask_after(example()).dense()
    assert visible[0, :, 12:].int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1]]


def test_a_window_limits_attention_to_near_positions_and_padding_in_between_does_not_count():
    prefix = example()
    full, near = prefix.attention_mask().dense(), prefix.attention_mask().dense(window=3)
    distance = (prefix.positions[:, :, None] - prefix.positions[:, None, :]).abs()
    assert torch.equal(near, (full & (distance < 3)) | torch.eye(12, dtype=torch.bool))
    assert near[0, 9, 4], "tokens 4 and 9 are adjacent: between them is only padding"
    assert not near[0, 9, 2]


@pytest.mark.parametrize("window", [None, 3])
def test_a_block_mask_equals_the_dense_mask(window):
    prefix = example()
    for attention_mask in (prefix.attention_mask(), suffix(1, 2).attention_mask_after(prefix)):
        dense, block = attention_mask.dense(window), attention_mask.build("flex", window)
        visible = [
            [
                [bool(block.mask_mod(*map(torch.tensor, (b, 0, q, k)))) for k in range(dense.shape[2])]
                for q in range(dense.shape[1])
            ]
            for b in range(2)
        ]
        assert torch.equal(torch.tensor(visible), dense)


def test_a_token_is_predicted_by_the_last_valid_token_before_it():
    prefix = example()
    assert prefix.predictor_indices("fast").tolist() == [[4, 9, 10], [7, 9, 9]]
    assert prefix.predictor_indices("response")[1].tolist() == [6, 7]
    indices = prefix.predictor_indices("fast")
    assert torch.equal(gather_tokens(prefix.hidden, indices)[1, 2], prefix.hidden[1, 9])


def test_a_block_mask_can_be_compiled_into_the_kernel():
    """GPUs run it so; a mask that writes in place cannot be compiled."""
    attention_mask = example().attention_mask()
    query, key, value = torch.randn(3, 2, 1, 12, 16).unbind()
    compiled = torch.compile(flex_attention, dynamic=False)
    with torch.no_grad():
        output = compiled(query, key, value, block_mask=attention_mask.build("flex", window=3))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask.dense(window=3)[:, None]
        )
    torch.testing.assert_close(output, expected)


def long_masks(seed: int) -> list[AttentionMask]:
    """Masks of a prefix of several blocks of scores with holes, of which one sample is padding, and of a suffix after it."""
    generator = torch.Generator().manual_seed(seed)

    def valid(length: int) -> Tensor:
        mask = torch.rand(3, length, generator=generator) < torch.tensor([1.0, 0.9, 0.5])[:, None]
        mask[1, : length // 2], mask[2, length // 4 :] = False, False
        return mask

    prefix = concat_blocks(
        [
            Block(name="images", hidden=torch.zeros(3, 300, 1), valid=valid(300), attention="bidirectional"),
            Block(name="text", hidden=torch.zeros(3, 170, 1), valid=valid(170), attention="causal"),
        ]
    )
    after = concat_blocks([Block(name="actions", hidden=torch.zeros(3, 140, 1), valid=valid(140), attention="bidirectional")])
    return [prefix.attention_mask(), after.attention_mask_after(prefix)]


@pytest.mark.parametrize("seed", range(3))
def test_the_blocks_of_a_mask_are_those_of_its_dense_form(seed):
    for attention_mask in long_masks(seed):
        dense, block = attention_mask.dense(), attention_mask.block_mask()
        shape = dense.shape
        expected = create_block_mask(lambda b, h, q, k, dense=dense: dense[b, q, k], shape[0], None, *shape[1:], device="cpu")
        assert torch.equal(block.kv_num_blocks, expected.kv_num_blocks)
        assert torch.equal(block.full_kv_num_blocks, expected.full_kv_num_blocks)
        assert torch.equal(block.to_dense(), expected.to_dense())
        assert block.seq_lengths == shape[1:]
        assert expected.full_kv_num_blocks.sum() > 0, "there are blocks of each kind"
        assert (expected.kv_num_blocks.sum() + expected.full_kv_num_blocks.sum()) < expected.to_dense().numel()


@pytest.mark.parametrize("window", [1, 40, 200, 1000])
def test_blocks_in_a_window_have_every_visible_score_and_full_ones_no_other(window):
    for attention_mask in long_masks(0):
        dense, block = attention_mask.dense(window), attention_mask.block_mask(window)
        padded = functional.pad(dense, (0, -dense.shape[2] % 128, 0, -dense.shape[1] % 128))
        by_block = padded.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
        is_visible, is_full = by_block.any(dim=(2, 4)), by_block.all(dim=(2, 4))
        full = columns(block.full_kv_num_blocks, block.full_kv_indices)
        computed = columns(block.kv_num_blocks, block.kv_indices) | full
        assert not (is_visible & ~computed).any()
        assert not (full & ~is_full).any()
        if window == 40:
            assert computed.sum() < columns_without_window(attention_mask).sum(), "far blocks are left out"


def columns(counts: Tensor, indices: Tensor) -> Tensor:
    """Return which blocks a block mask has, as (B, Q blocks, K blocks) bool."""
    is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros_like(indices, dtype=torch.bool).scatter(-1, indices.long(), is_listed)[:, 0]


def columns_without_window(attention_mask: AttentionMask) -> Tensor:
    block = attention_mask.block_mask()
    return columns(block.kv_num_blocks, block.kv_indices) | columns(block.full_kv_num_blocks, block.full_kv_indices)
