from __future__ import annotations

import torch
from benchbox_policies._layers.prefix import Block, lay, select

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
    return lay(
        [
            Block(
                name=name,
                hidden=torch.randn(2, length, 8),
                valid=torch.tensor(VALID[name], dtype=torch.bool),
                attention=ATTENTION[name],
                readable=name != "fast",
            )
            for name, length in LENGTHS.items()
        ]
    )


def test_a_query_sees_a_key_whose_group_is_not_later_if_both_are_valid():
    prefix = example()
    valid = torch.cat([torch.tensor(VALID[name], dtype=torch.bool) for name in LENGTHS], dim=1)
    visible = prefix.visible()
    for b in range(2):
        for i in range(12):
            for j in range(12):
                expected = i == j or (GROUPS[j] <= GROUPS[i] and bool(valid[b, i]) and bool(valid[b, j]))
                assert visible[b, i, j] == expected, (b, i, j)


def test_a_bidirectional_block_after_another_is_not_seen_by_it():
    blocks = [
        Block(name=name, hidden=torch.zeros(1, 2, 1), valid=torch.ones(1, 2, dtype=torch.bool), attention="bidirectional")
        for name in ("first", "second")
    ]
    visible = lay(blocks).visible()[0].int().tolist()
    assert visible == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]


def test_padding_takes_no_position():
    positions = example().positions
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 4, 4, 4, 4, 5, 6, 7]
    assert positions[1, 3:8].tolist() == [0, 1, 2, 3, 4]


def test_the_suffix_reads_valid_readable_tokens_and_itself_and_its_positions_follow_theirs():
    prefix = example()
    visible = prefix.visible_to_suffix(2)
    assert visible.shape == (2, 2, 14)
    assert visible[0, 0].int().tolist() == visible[0, 1].int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert prefix.suffix_positions(2).tolist() == [[5, 6], [5, 6]]


def test_a_token_is_predicted_by_the_last_valid_token_before_it():
    prefix = example()
    assert prefix.predictors("fast").tolist() == [[4, 9, 10], [7, 9, 9]]
    assert prefix.predictors("response")[1].tolist() == [6, 7]
    places = prefix.predictors("fast")
    assert torch.equal(select(prefix.hidden, places)[1, 2], prefix.hidden[1, 9])
