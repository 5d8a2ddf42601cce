"""Installation beside lerobot, resolved by uv against the package index. Nothing is installed."""

from __future__ import annotations

import pytest
from packaging.version import Version

from tests.compat.resolution import NEIGHBOURS, NetworkError, NoSolutionError, resolve
from tests.support.tiers import in_tiers


def resolve_online(requirements, python_version):
    try:
        return resolve(requirements, python_version)
    except NetworkError as error:
        pytest.skip(f"the package index does not answer: {str(error).splitlines()[-1]}")


# With its extras a neighbour requires all that it requires without them, and more.
@pytest.mark.parametrize(
    "neighbour",
    in_tiers(NEIGHBOURS, lambda neighbour: "[" in neighbour.requirement),
    ids=lambda neighbour: neighbour.requirement,
)
def test_benchbox_can_be_installed_beside_lerobot(neighbour):
    versions = {
        name: Version(version) for name, version in resolve_online([neighbour.requirement], neighbour.python_version).items()
    }
    limit = "2.11" if versions["lerobot"] < Version("0.5") else "2.12"
    assert Version("2.10") <= versions["torch"] < Version(limit)
    assert {"deepspeed", "accelerate", "transformers", "av"} <= set(versions)


def test_requirements_that_contradict_those_of_benchbox_are_no_solution():
    try:
        with pytest.raises(NoSolutionError, match="torch"):
            resolve(["torch<2"], "3.11")
    except NetworkError as error:
        pytest.skip(f"the package index does not answer: {str(error).splitlines()[-1]}")
