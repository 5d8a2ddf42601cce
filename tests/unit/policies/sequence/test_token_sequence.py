from __future__ import annotations

import pytest
import torch
from benchbox_policies._layers.sequence.token_sequence import Block, TokenSequence, concat_blocks, gather_tokens
from torch.nn.attention.flex_attention import flex_attention

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
    """Compile it as on a GPU, where a mask that writes in place fails."""
    attention_mask = example().attention_mask()
    query, key, value = torch.randn(3, 2, 1, 12, 16).unbind()
    compiled = torch.compile(flex_attention, dynamic=False)
    with torch.no_grad():
        output = compiled(query, key, value, block_mask=attention_mask.build("flex", window=3))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask.dense(window=3)[:, None]
        )
    torch.testing.assert_close(output, expected)
