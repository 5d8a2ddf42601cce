"""Checks, before a training begins, of the texts that its policy learns and of what it does not see of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.data.samples.mixture import MixtureSamples
from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from benchbox.registry.contracts import BatchSpec


def check_targets(samples: object, spec: BatchSpec | None) -> None:
    """Check that the datasets have a text to learn for a policy that learns nothing else. Generated samples have all texts.

    Args:
        spec: None for a policy that generates its samples.

    Raises:
        ConfigurationError: they have none, so that every loss would be 0.
    """
    if spec is None or not spec.sole_targets or not isinstance(samples, MixtureSamples):
        return
    if any(member.dataset.has_text(name) for member in samples.members for name in spec.sole_targets):
        return
    paths = ", ".join(dict.fromkeys(member.settings.path for member in samples.members))
    names = " and ".join(spec.sole_targets)
    message = f"the policy learns only the texts {names}, and {paths} has none of them: every loss would be 0"
    raise ConfigurationError(Problem("data", message, "add such a text feature to the dataset, or choose another policy"))


def describe_unseen_data(samples: object) -> list[str]:
    """Return lines on what the policy does not get of its datasets, each with the remedy: images, ends of texts, metadata."""
    if not isinstance(samples, MixtureSamples):
        return []
    lines = (*samples.describe_blind_datasets(), *describe_long_prompts(samples), *samples.describe_long_targets())
    return list(dict.fromkeys(lines))


def describe_long_prompts(samples: object) -> list[str]:
    """Return a line for each dataset with prompts that may not fit whole, with the remedy."""
    if not isinstance(samples, MixtureSamples):
        return []
    return list(dict.fromkeys(samples.describe_long_prompts()))
