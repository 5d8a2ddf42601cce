"""Mixtures of datasets of different robots."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchbox.data.dataset.lerobot import open_dataset
from benchbox.data.loading.loader import open_stream
from benchbox.data.normalisation import Normaliser
from benchbox.data.samples.mixture import MixtureSamples, drawn_shares, select_datasets
from benchbox.data.samples.training_texts import describe_unseen_data
from benchbox.data.samples.windows import DatasetSamples
from benchbox.errors import DataError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec
from tests.support.datasets import write_dataset, write_robot

ARM, HAND = (9, 4, 7), (5, 12)  # lengths of episodes


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """An arm with two cameras, and a hand with wider actions, other cameras and another rate."""
    folder = tmp_path_factory.mktemp("robots")
    arm = write_robot(folder / "arm", cameras={"top": (32, 48), "wrist": (24, 24)}, lengths=ARM, level=200, robot="arm")
    hand = write_robot(
        folder / "hand",
        cameras={"cam_top": (40, 40), "side": (24, 24)},
        state=5,
        action=6,
        fps=30,
        lengths=HAND,
        level=90,
        scale=10.0,
        robot="hand",
    )
    return str(arm), str(hand)


def settings(roots, **hand):
    values = {"rename": (("cam_top", "top"),), "control_mode": "ee", "source": "bridge"} | hand
    return [DatasetSpec(path=roots[0]), DatasetSpec(path=roots[1], **values)]


def mixture(specs, spec, *, seed=0, validation=0.0):
    opened = [(open_dataset(dataset.path), dataset) for dataset in specs]
    return MixtureSamples(select_datasets(opened, validation=validation, seed=seed), spec, seed)


@pytest.fixture
def spec3(bare_spec):
    return replace(bare_spec, cameras=4, returns=True)


def test_all_frames_are_in_one_index_space_and_each_is_drawn_once(roots, spec3):
    samples = mixture(settings(roots), spec3)
    (group,) = samples.groups()
    assert len(samples) == len(group) == sum(ARM) + sum(HAND)
    assert sorted(group.index_of(i) for i in range(len(group))) == list(range(len(samples)))
    rows = [samples.sample(0, index) for index in range(len(samples))]
    places = [tuple(int(row[f"{key}_index"]) for key in ("dataset", "episode", "frame")) for row in rows]
    lengths = [(0, ARM), (1, HAND)]
    assert places == [(d, e, f) for d, of in lengths for e, length in enumerate(of) for f in range(length)]


def test_provenance_travels_as_numbers_whose_names_are_in_a_table(roots, spec3):
    samples = mixture([*settings(roots), DatasetSpec(path=roots[0], control_mode="ee", source="bridge")], spec3)
    names = samples.provenance
    assert names.datasets == (roots[0], roots[1], roots[0])
    assert (names.sources, names.control_modes) == (("arm", "bridge"), ("unknown", "ee"))
    rows = [samples.sample(0, index) for index in (0, sum(ARM), len(samples) - 1)]
    assert [[int(row[key]) for key in ("dataset_index", "source_index", "control_mode_index")] for row in rows] == [
        [0, 0, 0],
        [1, 1, 1],
        [2, 1, 1],
    ]
    assert all(row["source_index"].dtype == row["control_mode_index"].dtype == torch.int64 for row in rows)


def test_cameras_have_slots_by_name_and_missing_ones_are_black_and_masked(roots, spec3):
    samples = mixture(settings(roots), spec3)
    assert samples.cameras == ("top", "wrist", "side")
    arm, hand = samples.sample(0, 3), samples.sample(0, sum(ARM) + 3)
    assert arm["image_mask"][-1].tolist() == [True, True, False, False]
    assert hand["image_mask"][-1].tolist() == [True, False, True, False]
    brightest = [[int(row["images"][-1, slot].max()) for slot in range(4)] for row in (arm, hand)]
    assert brightest == [[pytest.approx(200, abs=4)] * 2 + [0, 0], [pytest.approx(90, abs=4), 0, pytest.approx(90, abs=4), 0]]


def test_a_policy_with_fewer_cameras_gets_the_first_slots(roots, spec3):
    samples = mixture(settings(roots), replace(spec3, cameras=1))
    assert samples.cameras == ("top",)
    assert bool(samples.sample(0, sum(ARM))["image_mask"][-1, 0])
    unnamed = mixture(settings(roots, rename=()), replace(spec3, cameras=2))
    assert unnamed.cameras == ("top", "wrist")
    assert not unnamed.sample(0, sum(ARM))["image_mask"].any()


def test_a_dataset_of_which_no_camera_has_a_slot_is_named_with_the_remedy(roots, spec3):
    (line,) = describe_unseen_data(mixture(settings(roots, rename=()), replace(spec3, cameras=2)))
    assert line == (
        f"{roots[1]}: all images of this dataset are black: the policy's cameras are top, wrist, and its own cam_top, side; "
        "rename them, or raise cams"
    )
    assert describe_unseen_data(mixture(settings(roots), replace(spec3, cameras=2))) == [], "one camera has a slot"
    assert describe_unseen_data(mixture(settings(roots, rename=()), replace(spec3, cameras=4))) == []
    assert describe_unseen_data(mixture(settings(roots, rename=()), replace(spec3, cameras=0))) == []


def test_narrow_states_and_actions_are_padded_and_masked(roots, spec3):
    samples = mixture(settings(roots), spec3)
    arm, hand = samples.sample(0, 1), samples.sample(0, sum(ARM) + 1)
    assert [int(row["action_dim_mask"].sum()) for row in (arm, hand)] == [2, 6]
    assert arm["action"][0].tolist() == [1, 2, 0, 0, 0, 0]
    assert hand["action"][0].tolist() == [10, 20, 30, 40, 50, 60]
    assert arm["state"].shape == hand["state"].shape == (3, 8)


def test_a_chunk_does_not_go_on_into_the_next_dataset(roots, spec3):
    row = mixture(settings(roots), spec3).sample(0, sum(ARM) - 1)
    assert row["action_is_pad"].tolist() == [False, True, True, True, True]
    assert row["action"][:, 0].tolist() == [6] * 5


def test_returns_are_relative_to_the_longest_episode_of_their_own_dataset(roots, spec3):
    samples = mixture(settings(roots), spec3)
    assert samples.sample(0, 0)["returns"] == pytest.approx(-8 / max(ARM))
    assert samples.sample(0, sum(ARM))["returns"] == pytest.approx(-4 / max(HAND))


def test_each_sample_is_normalised_by_its_own_dataset(roots, spec3):
    samples = mixture(settings(roots), spec3)
    assert len(samples.statistics) == 2
    normaliser = Normaliser(spec3.action_dim, "min_max")
    normaliser.load([statistics["action"] for statistics in samples.statistics])
    last = [sum(ARM[:1]) - 1, sum(ARM) + sum(HAND) - 1]  # the largest action of each dataset
    rows = [samples.sample(0, index) for index in last]
    action = torch.stack([row["action"] for row in rows])
    index = torch.stack([row["dataset_index"] for row in rows])
    ends = normaliser.normalise(action, index)[:, 0]
    torch.testing.assert_close(ends, torch.tensor([[1.0, 1, 0, 0, 0, 0], [1.0] * 6]), atol=1e-4, rtol=0)
    swapped = normaliser.normalise(action, 1 - index)[:, 0]
    assert not torch.allclose(swapped, ends, atol=0.1)


def test_state_bins_in_prompts_are_of_the_samples_own_dataset(roots, spec3):
    """Both robots are half-way between the ends of their states, which differ tenfold."""
    samples = mixture(settings(roots), replace(spec3, state_normalisation="min_max", prompt_end=""))
    prompts = []
    for index in (4, sum(ARM) + sum(HAND[:1]) + 11):
        row = samples.sample(0, index)
        prompts.append("".join(chr(token - 3) for token in row["prompt_tokens"][row["prompt_mask"]].tolist() if token > 2))
    assert prompts == ["Task: task of arm, State: 127 127 127;\n", "Task: task of hand, State: 255 255 255 255 255;\n"]


def test_one_fast_tokenizer_takes_chunks_of_every_width(roots, spec):
    samples = mixture(settings(roots), replace(spec, fast_tokens=60, fast_vocab=300))
    arm, hand = samples._parts
    assert arm.fast is hand.fast
    for part, width in ((arm, 2), (hand, 6)):
        chunk = part.chunk(1)
        decoded = part.fast.decode(part.fast.encode(chunk))
        assert decoded.shape == (5, width)
        assert np.abs(decoded - np.clip(chunk, -1, 1)).max() <= np.sqrt(5) / 20
    row = samples.sample(0, sum(ARM) + 1)
    ids = row["fast_tokens"][row["fast_mask"]].tolist()
    assert row["fast_truncated"] == 0
    np.testing.assert_array_equal(hand.fast.decode(ids), hand.fast.decode(hand.fast.encode(hand.chunk(1))))


def test_the_fast_tokenizer_learns_from_each_dataset_by_its_drawn_share(roots, spec, monkeypatch):
    monkeypatch.setattr("benchbox.data.samples.mixture.FAST_CHUNKS", 8)

    def widths(arm, hand):
        specs = [replace(dataset, weight=weight) for dataset, weight in zip(settings(roots), (arm, hand), strict=True)]
        samples = mixture(specs, replace(spec, fast_tokens=60, fast_vocab=300))
        return [chunk.shape[1] for chunk in samples._fast_chunks()]

    assert widths(3.0, 1.0) == [2] * 6 + [6] * 2
    assert widths(1.0, 3.0) == [2] * 2 + [6] * 6


def test_weights_make_a_group_of_each_dataset(roots, spec3):
    specs = [replace(dataset, weight=weight) for dataset, weight in zip(settings(roots), (1.0, 3.0), strict=True)]
    samples = mixture(specs, spec3)
    arm, hand = samples.groups()
    assert (arm.weight, hand.weight) == (1.0, 3.0)
    assert [arm.index_of(0), hand.index_of(0)] == [0, sum(ARM)]
    assert (len(arm), len(hand)) == (sum(ARM), sum(HAND))
    assert samples.shares == [0.25, 0.75]
    frames = sum(ARM) + sum(HAND)
    assert drawn_shares(mixture(settings(roots), spec3).members) == [sum(ARM) / frames, sum(HAND) / frames]


def test_no_two_samples_of_a_mixture_have_the_same_noise(roots, spec3):
    samples = mixture(settings(roots), spec3)
    assert not torch.equal(samples.sample(0, 0)["noise"], samples.sample(0, sum(ARM))["noise"])


def test_a_mixture_of_one_is_the_dataset(tmp_path, spec):
    root = write_dataset(tmp_path / "bars")
    alone, mixed = DatasetSamples(open_dataset(root), spec, seed=3), mixture([DatasetSpec(path=str(root))], spec, seed=3)
    alone.fast = mixed.fast
    for index in (0, 13, 20):
        left, right = alone.sample(1, index), mixed.sample(1, index)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stream_of_a_mixture_is_a_function_of_its_arguments(roots, spec3, workers):
    data = DataSpec(kind="lerobot", datasets=tuple(settings(roots)), workers=workers)

    def stream(**of):
        return open_stream(data, spec3, **({"batch": 4, "accumulation": 1, "rank": 0, "world_size": 1, "seed": 5} | of))

    whole, halves = stream(), [stream(batch=2, rank=rank, world_size=2) for rank in (0, 1)]
    assert whole.provenance.control_modes == ("unknown", "ee")
    drawn = set()
    for _ in range(9):  # an epoch of 37 samples
        batch, (first, second) = next(whole), map(next, halves)
        assert all(torch.equal(batch[name], torch.cat((first[name], second[name]))) for name in batch)
        drawn |= set(batch["dataset_index"].tolist())
    assert drawn == {0, 1}
    for opened in (whole, *halves):
        opened.close()


def test_a_dataset_that_is_too_wide_for_the_policy_is_named(roots, spec3):
    with pytest.raises(DataError, match=r"hand: action has 6 dimensions, and the policy takes 4"):
        mixture(settings(roots), replace(spec3, action_dim=4))


@pytest.mark.parametrize("order", ["frame_shuffle", "episode_shuffle"])
def test_samples_are_drawn_by_weight_and_counted_by_dataset(roots, spec3, order):
    datasets = tuple(replace(dataset, weight=weight) for dataset, weight in zip(settings(roots), (3.0, 1.0), strict=True))
    data = DataSpec(kind="lerobot", datasets=datasets, workers=0, block=4, buffer=16)
    stream = open_stream(data, spec3, batch=16, accumulation=1, rank=0, world_size=1, seed=0, order=order)
    for _ in range(64):
        next(stream)
    assert [dataset["drawn"] for dataset in stream.data_use.record()["datasets"]] == [768, 256]


@pytest.mark.parametrize("name", ["pi05", "vitra", "cosmos_droid", "pi07_low_level", "value"])
def test_policies_train_on_a_batch_of_two_robots(name, roots):
    policy = build_policy(name, "tiny", Axes())
    data = DataSpec(kind="lerobot", datasets=tuple(settings(roots)), workers=0)
    stream = open_stream(data, policy.batch_spec(), batch=4, accumulation=1, rank=0, world_size=1, seed=0)
    policy.load_statistics(stream.statistics)
    batch = next(stream)
    assert set(batch["dataset_index"].tolist()) == {0, 1}
    assert torch.isfinite(policy(batch).total)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("halves", [False, True])
def test_no_episode_of_a_dataset_that_is_named_twice_is_both_trained_on_and_validated(tmp_path, seed, halves):
    """Its entries may draw from the same frames with another weight, or from halves of every episode."""
    dataset = open_dataset(write_dataset(tmp_path / "data", lengths=(6,) * 10, tasks=("lift",) * 10))
    keeps = [None, None]
    if halves:
        keeps = [str(tmp_path / f"keep-{half}.json") for half in range(2)]
        for half, keep in enumerate(keeps):
            ranges = {str(episode.index): [[3 * half, 3 * half + 3]] for episode in dataset.episodes}
            Path(keep).write_text(json.dumps(ranges))
    entries = [(dataset, DatasetSpec(path=str(dataset.root), keep=keep)) for keep in keeps]
    members = select_datasets(entries, validation=0.2, seed=seed)

    def episodes(segments):
        return {dataset.episode_of(int(start)).index for start, _ in segments}

    trained, validated = (
        set().union(*(episodes(getattr(member.selection, name)) for member in members)) for name in ("training", "validation")
    )
    assert len(validated) == 2
    assert trained.isdisjoint(validated)
