"""Adapters of packages that are not here, and policies that they cannot build."""

from __future__ import annotations

import pytest

from benchbox.errors import ConfigurationError, UnsupportedError
from benchbox.registry.contracts import Axes
from benchbox.registry.policies import build_policy, find_policies


def build(name):
    return build_policy(name, "tiny", Axes(attention="native"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smolvla", "loads a processor from the model hub"),
        ("groot", "loads published weights from the model hub"),
        ("pi0", "asks for lerobot's patched transformers, which is not on PyPI"),
        ("pi05", "asks for lerobot's patched transformers, which is not on PyPI"),
        ("pi0_fast", "asks for lerobot's patched transformers, which is not on PyPI"),
    ],
)
def test_a_policy_that_needs_more_than_its_package_says_what(name, reason):
    with pytest.raises(UnsupportedError, match=f"^lerobot:{name} cannot be built here: its constructor {reason}$"):
        build(f"lerobot:{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lerobot:actt", "policy lerobot:actt: is not one that this adapter builds; did you mean 'act'?"),
        ("diffusers:unet", "policy diffusers:unet: is not one that this adapter builds; diffusers:dit"),
        ("flax:x", "unknown adapter 'flax' in policy 'flax:x'; one of diffusers, hf, lerobot"),
    ],
)
def test_an_unknown_name_is_one_line(name, message):
    with pytest.raises(ConfigurationError) as caught:
        build(name)
    assert str(caught.value) == message


@pytest.mark.parametrize(("name", "package"), [("lerobot:act", "lerobot"), ("diffusers:dit", "diffusers")])
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
