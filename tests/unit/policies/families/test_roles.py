from __future__ import annotations

import pytest

from tests.support.policy_batches import build

TOWERS = {
    "model.vision.layers.0.query.weight": "vision",
    "model.vision.position": "vision",
    "model.projector.weight": "vision",
    "model.vocabulary.weight": "backbone",
    "model.layers.0.backbone.query.weight": "backbone",
    "model.norm.weight": "backbone",
    "model.layers.0.expert.query.weight": "expert",
    "model.expert_norm.modulation.weight": "expert",
    "action_in.weight": "head",
    "discrete.embedding.weight": "head",
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_parameter_is_in_the_tower_that_its_name_says(name):
    """Expert and head are trained from scratch."""
    role = build("pi05").parameter_roles()[name]
    assert role.tower == TOWERS[name]
    assert role.part == ("head" if role.tower in ("expert", "head") else "backbone")
