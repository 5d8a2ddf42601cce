"""Published weights are copied to their parameters, or refused with a message of one line."""

from __future__ import annotations

import json

import pytest
import torch
from benchbox_policies._layers.weights.published import load_published, match_tensors
from benchbox_policies._layers.weights.published_names import parameter_names
from safetensors.torch import save_file

from benchbox.errors import ConfigurationError, DataError
from tests.support.policy_batches import build, build_on_meta
from tests.support.published_weights import PUBLISHED, PUBLISHED_LAYERS, UNUSED_HEAD, random_tensors, sizes, table

TINY = sizes(48, 96, 16, 8, 64, 128, 32, 64, 4 * 16, 16, 384, 32)
TINY_LAYERS = {"vision": 2, "decoder": 3}
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
TABLE = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
FAST = ("discrete.embedding.weight", "discrete.head.weight", "discrete.head.bias")  # not published by either project

# Names in each project's files, from openpi's names.
LAYOUTS = {
    "openpi": lambda name: name,
    "lerobot": lambda name: f"model.{name}",
    "lerobot, transformers 5": lambda name: f"model.{name}".replace(".vision_model.", "."),
    "lerobot, transformers before 4.52": lambda name: (
        f"model.{name}".replace("paligemma.model.language_model.", "paligemma.language_model.model.")
        .replace("paligemma.model.", "paligemma.")
        .replace("paligemma.lm_head", "paligemma.language_model.lm_head")
    ),
    "the table instead of the head": lambda name: TABLE if name == HEAD else name,
}


def tiny_tensors(policy="pi05"):
    """The tensors of a tiny file in openpi's layout."""
    return random_tensors(
        {name: shape for name, (_, shape) in table(policy, TINY, TINY_LAYERS).items()} | {UNUSED_HEAD: (384, 32)}
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["pi0", "pi05"])
def test_every_tensor_of_openpi_and_lerobot_is_copied_to_its_parameter(tmp_path, policy, layout):
    published, rename = tiny_tensors(policy), LAYOUTS[layout]
    save_file({rename(name): tensor for name, tensor in published.items()}, tmp_path / "model.safetensors")
    loaded_policy = build(policy)
    loaded = load_published(loaded_policy, tmp_path)
    for name, (parameter, _) in table(policy, TINY, TINY_LAYERS).items():
        assert torch.equal(loaded_policy.get_parameter(parameter), published[name]), name
    assert loaded.unexpected == (rename(UNUSED_HEAD),)
    assert loaded.missing == (FAST if policy == "pi05" else ())
    assert loaded.fitted == {}


@pytest.mark.parametrize(("policy", "tensors"), [("pi0", 777), ("pi05", 812)])
def test_full_has_the_published_names_and_shapes_and_no_more(tmp_path, policy, tensors):
    rows = table(policy, PUBLISHED, PUBLISHED_LAYERS)
    assert len(rows) + 1 == tensors  # as in LeRobot's file of pi05, and as pi0 has with its norms
    full = build_on_meta(policy, "full")
    sources = match_tensors(full, {name: shape for name, (_, shape) in rows.items()}, tmp_path)
    assert sources == {loaded_policy: [name] for name, (loaded_policy, _) in rows.items()}
    unmatched = {name for name, _ in full.named_parameters()} - set(sources)
    assert unmatched == (set(FAST) if policy == "pi05" else set())


def test_weights_saved_by_training_can_be_loaded(tmp_path):
    """The file has the policy's own names, and buffers of data statistics in addition to the parameters."""
    trained = build("pi06")
    save_file({name: tensor + 1.0 for name, tensor in trained.state_dict().items()}, tmp_path / "model.safetensors")
    reloaded = build("pi06")
    loaded = load_published(reloaded, tmp_path / "model.safetensors")
    assert all(torch.equal(reloaded.get_parameter(name), tensor + 1.0) for name, tensor in trained.named_parameters())
    assert loaded.missing == ()
    assert all("normaliser" in name for name in loaded.unexpected)


def test_the_norms_of_an_expert_beside_gemma_3_are_those_of_gemma_1():
    """The name of Gemma 1's MLP norm is that of another norm in Gemma 3."""
    names = [
        "language_model.layers.0.pre_feedforward_layernorm.weight",
        "language_model.layers.0.post_attention_layernorm.weight",
        "gemma_expert.model.layers.0.post_attention_layernorm.dense.weight",
    ]
    assert list(parameter_names(names).values()) == [
        "model.layers.0.backbone.mlp_norm.weight",
        "model.layers.0.backbone.output_norm.weight",
        "model.layers.0.expert.mlp_norm.modulation.weight",
    ]


@pytest.mark.parametrize("name", ["state_proj", "proprio_history_proj"])
def test_the_projection_of_states_of_opentau_and_of_lerobot_is_that_of_pi05_mem(tmp_path, name):
    policy, weight = build("pi05_mem"), torch.randn(64, 32)
    save_file({f"model.{name}.weight": weight, f"model.{name}.bias": weight[:, 0].clone()}, tmp_path / "w.safetensors")
    assert load_published(policy, tmp_path / "w.safetensors").unexpected == ()
    assert torch.equal(policy.state_in.weight, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_read_into_float32(tmp_path, dtype):
    published = {name: tensor.to(dtype) for name, tensor in tiny_tensors().items()}
    save_file(published, tmp_path / "w.safetensors")
    loaded_policy = build()
    load_published(loaded_policy, tmp_path / "w.safetensors")
    assert loaded_policy.action_in.weight.dtype == torch.float32
    assert torch.equal(loaded_policy.action_in.weight, published["action_in_proj.weight"].float())


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_loaded_by_their_index_or_as_a_folder(tmp_path, index):
    published = tiny_tensors()
    names = sorted(published)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, shard_names in shards.items():
        save_file({name: published[name] for name in shard_names}, tmp_path / file)
    if index:
        weight_map = {name: file for file, shard_names in shards.items() for name in shard_names}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        save_file({"unlisted": torch.zeros(1)}, tmp_path / "c.safetensors")  # not in the index
    loaded_policy = build()
    loaded = load_published(loaded_policy, tmp_path)
    assert torch.equal(loaded_policy.action_out.bias, published["action_out_proj.bias"])
    assert torch.equal(loaded_policy.action_in.bias, published["action_in_proj.bias"])
    assert loaded.unexpected == (UNUSED_HEAD,)


def test_positions_of_another_resolution_are_resized_and_reported(tmp_path):
    """The table contains the row and column of each position, which bilinear resizing preserves, clamped at the border."""
    name = "model.vision_tower.vision_model.embeddings.position_embedding.weight"
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")
    grid = torch.stack((rows, 10 * columns), dim=-1).flatten(0, 1)
    save_file({name: grid.repeat(1, 24)}, tmp_path / "w.safetensors")
    loaded_policy = build("pi06")  # 8 x 8 positions of width 48
    loaded = load_published(loaded_policy, tmp_path / "w.safetensors")
    coordinates = ((torch.arange(8.0) + 0.5) / 2 - 0.5).clamp(0, 3)
    rows, columns = torch.meshgrid(coordinates, coordinates, indexing="ij")
    expected = torch.stack((rows, 10 * columns), dim=-1).flatten(0, 1).repeat(1, 24)
    torch.testing.assert_close(loaded_policy.model.vision.position.detach(), expected)
    assert loaded.fitted == {"model.vision.position": "resized bilinearly from 16 to 64 positions"}


def test_the_first_rows_of_a_padded_text_embedding_are_copied(tmp_path):
    published = tiny_tensors() | {HEAD: torch.randn(448, 64)}
    save_file(published, tmp_path / "w.safetensors")
    loaded_policy = build()
    loaded = load_published(loaded_policy, tmp_path / "w.safetensors")
    assert torch.equal(loaded_policy.model.vocabulary.weight, published[HEAD][:384])
    assert loaded.fitted == {"model.vocabulary.weight": "the first 384 of 448 rows"}


BAD = {
    "another width": (
        lambda tensors: {"action_in_proj.weight": tensors["action_in_proj.weight"][:, :7].clone()},
        "action_in_proj.weight is 32 x 7, and action_in.weight of Pi05 is 32 x 32",
    ),
    "fewer words": (
        lambda tensors: {HEAD: tensors[HEAD][:300].clone(), "time_mlp_in.bias": torch.zeros(())},
        f"{HEAD} is 300 x 64, and model.vocabulary.weight of Pi05 is 384 x 64; 1 more",
    ),
    "positions of no square": (
        lambda tensors: {(name := next(key for key in tensors if "position" in key)): tensors[name][:15].clone()},
        "position_embedding.weight is 15 x 48, and model.vision.position of Pi05 is 16 x 48",
    ),
    "quantised": (
        lambda tensors: {"time_mlp_in.weight": tensors["time_mlp_in.weight"].to(torch.int8)},
        "time_mlp_in.weight is I8, and weights are read in F64, F32, F16, BF16",
    ),
    "not tied": (lambda tensors: {TABLE: tensors[HEAD] + 1e-3}, f"{TABLE} differ, and are one tensor here"),
}


@pytest.mark.parametrize("bad", BAD)
def test_weights_that_do_not_fit_raise_one_line_and_change_nothing(tmp_path, bad):
    change, line = BAD[bad]
    tensors = tiny_tensors()
    save_file(tensors | change(tensors), tmp_path / "w.safetensors")
    loaded_policy = build()
    before = {name: parameter.clone() for name, parameter in loaded_policy.named_parameters()}
    with pytest.raises((ConfigurationError, DataError)) as raised:
        load_published(loaded_policy, tmp_path / "w.safetensors")
    assert str(raised.value).startswith(f"{tmp_path}/w.safetensors: ")
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
    assert all(torch.equal(parameter, before[name]) for name, parameter in loaded_policy.named_parameters())


@pytest.mark.parametrize(
    ("policy", "tensors", "line"),
    [
        ("pi05", {"layers.0.attn.wq": torch.zeros(2)}, "none of its tensors belongs to Pi05: layers.0.attn.wq"),
        ("pi05", {}, "none of its tensors belongs to Pi05: it is empty"),
        (
            "cosmos_droid",
            tiny_tensors(),
            "down_proj.weight is 32 x 64, and model.layers.0.expert.mlp.down.weight of CosmosDroid is 64 x 128; ",
        ),
    ],
)
def test_weights_of_another_policy_are_refused_in_a_line(tmp_path, policy, tensors, line):
    save_file(tensors, tmp_path / "w.safetensors")
    with pytest.raises((ConfigurationError, DataError)) as raised:
        load_published(build(policy), tmp_path / "w.safetensors")
    assert f"{tmp_path}/w.safetensors: " in str(raised.value)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_policy_that_predicts_no_text_loads_the_embedding_of_a_file_whose_head_differs(tmp_path):
    """LeRobot 0.6 writes such files after a training step, which trains the embedding and not the head."""
    tensors = tiny_tensors() | {TABLE: torch.full((448, 64), 0.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    policy = build(size="tiny_flow")
    loaded = policy.load_weights(tmp_path)
    assert torch.equal(policy.model.vocabulary.weight, torch.full((384, 64), 0.5))
    assert loaded.unexpected == (UNUSED_HEAD, HEAD)
    assert loaded.fitted == {
        "model.vocabulary.weight": f"{TABLE}, from which {HEAD} differs; no text is predicted; the first 384 of 448 rows"
    }


def test_a_policy_that_predicts_text_refuses_a_file_whose_head_differs(tmp_path):
    save_file(tiny_tensors() | {TABLE: torch.full((384, 64), 0.5)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="remove one of them from the file, or choose a policy or preset that predicts no text"):
        build().load_weights(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    for file in ("a", "b"):
        save_file({HEAD: torch.zeros(384, 64)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(DataError, match=f"{HEAD} is in two of its files"):
        load_published(build(), tmp_path)
