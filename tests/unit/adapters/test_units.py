"""Layers of modules of others, and the roles of their parameters."""

from __future__ import annotations

import pytest
from torch import nn

from benchbox.adapters.roles import conventional_roles
from benchbox.adapters.units import find_layer_units


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.norm = nn.LayerNorm(width)


class VisionLayer(Layer):
    pass


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))


class Model(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_the_class_that_repeats_in_a_list_is_the_layer():
    """Not the classes inside it, nor one that repeats in two different places."""
    layers = nn.ModuleList(Layer() for _ in range(3))
    assert find_layer_units(Model(layers=layers, first=VisionLayer(), second=VisionLayer())) == (Layer,)


def test_of_classes_that_contain_one_another_the_outer_one_is_the_layer():
    assert find_layer_units(Model(stages=nn.Sequential(Stage(), Stage()))) == (Stage,)


def test_each_tower_has_layers_of_its_own_the_largest_first():
    towers = {"vision": nn.ModuleList(VisionLayer(4) for _ in range(2)), "text": nn.ModuleList(Layer(8) for _ in range(2))}
    assert find_layer_units(Model(**towers)) == (Layer, VisionLayer)


def test_the_names_of_transformers_come_first():
    """A single layer in a list repeats nothing, but its name is declared; a declared class outside lists is no layer."""
    model = Model(layers=nn.ModuleList([Layer()]), embeddings=VisionLayer())
    assert find_layer_units(model) == ()
    model._no_split_modules = ["Layer", "VisionLayer"]
    assert find_layer_units(model) == (Layer,)


def test_linear_layers_alone_are_no_layers():
    assert find_layer_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ()


def test_norms_biases_and_vectors_do_not_decay():
    norm = nn.LayerNorm((2, 2))  # whose weight is a matrix
    model = Model(linear=nn.Linear(2, 2), norm=norm, embedding=nn.Embedding(3, 2))
    decayed = {name for name, role in conventional_roles(model).items() if role.decay}
    assert decayed == {"linear.weight", "embedding.weight"}


@pytest.mark.parametrize(
    ("name", "part", "tower"),
    [
        ("lm_head", "head", "head"),
        ("action_head", "head", "head"),
        ("action_expert", "head", "expert"),
        ("vision_tower", "backbone", "vision"),
        ("multihead_attn", "backbone", "backbone"),
        ("layers", "backbone", "backbone"),
    ],
)
def test_names_decide_the_part_and_the_tower(name, part, tower):
    role = conventional_roles(Model(**{name: nn.Linear(2, 2)}))[f"{name}.weight"]
    assert (role.part, role.tower) == (part, tower)
