"""Adapters of packages that are not here, and policies that they cannot build."""

from __future__ import annotations

import pytest

from benchbox.errors import ConfigurationError, UnsupportedError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy, find_policies


def build(name):
    return build_policy(name, "tiny", Axes(attention="native"))


def test_a_policy_that_needs_a_model_hub_is_refused():
    reason = "lerobot:groot cannot be built here: its constructor loads published weights from the model hub"
    with pytest.raises(UnsupportedError, match=f"^{reason}$"):
        build("lerobot:groot")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lerobot:actt", "adapter lerobot has no policy 'actt' at size tiny; did you mean 'act'?"),
        ("diffusers:unet", "adapter diffusers has no policy 'unet' at size tiny; one of dit"),
        ("flax:x", "unknown adapter 'flax' in policy 'flax:x'; one of diffusers, hf, lerobot"),
    ],
)
def test_an_unknown_name_is_one_line(name, message):
    with pytest.raises(ConfigurationError) as caught:
        build(name)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("lerobot:act", "lerobot"),
        ("lerobot:pi05", "lerobot"),
        ("lerobot:smolvla", "lerobot"),
        ("diffusers:dit", "diffusers"),
    ],
)
def test_a_missing_package_is_named(name, package):
    try:
        __import__(package)
    except ModuleNotFoundError:
        pass
    else:
        pytest.skip(f"{package} is installed here, so that its absence cannot be seen")
    with pytest.raises(ConfigurationError, match=f"needs the package {package}, which is not installed; pip install {package}"):
        build(name)


def test_adapters_are_no_policies_by_themselves():
    assert not {"hf", "lerobot", "diffusers", "_adapters"} & find_policies().keys()
