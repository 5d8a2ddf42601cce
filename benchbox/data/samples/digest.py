"""Digests of the data that a training draws from, by which a resumed training or a validation knows that they are the same."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np

from benchbox.data.format.metadata import STATE
from benchbox.data.normalisation import REQUIRED_STATISTICS
from benchbox.data.samples.mixture import MixtureSamples
from benchbox.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from benchbox.data.format.metadata import Statistics
    from benchbox.data.samples.mixture import MixtureDataset

# Digits of a statistic that count: those that are computed here may be rounded otherwise on another machine.
_DIGITS = 5
_NORMALISING = frozenset(name for names in REQUIRED_STATISTICS.values() for name in names)


class DatasetDigest(TypedDict):
    """Counts of a dataset on which the order of samples and the validation split depend, and SHA-256 of what they count."""

    dataset: str  # its path, or `sample`
    episodes: int
    frames: int
    kept_frames: int
    validation_episodes: int
    episode_lengths_sha256: str
    kept_frames_sha256: str
    validation_frames_sha256: str
    statistics_sha256: str  # of state and action, those that normalise
    state_statistics_sha256: str
    fast_sha256: NotRequired[str]  # of the FAST tokenizer that is trained on all datasets, of a policy that has one


# Key of a digest -> what it counts or digests, in the order in which a difference is stated: the first explains the others.
_COUNTS = {
    "episodes": "episodes",
    "frames": "frames",
    "kept_frames": "kept frames",
    "validation_episodes": "validation episodes",
}
_CONTENTS = {
    "episode_lengths_sha256": "the lengths of its episodes",
    "kept_frames_sha256": "the frames that are kept",
    "validation_frames_sha256": "the episodes for validation",
    "statistics_sha256": "the statistics of state and action",
    "state_statistics_sha256": "the statistics of the state",
    "fast_sha256": "the tokens of the FAST tokenizer, which is trained on the actions,",
}


def digest_datasets(samples: object) -> list[DatasetDigest]:
    """Return the digests of the datasets of samples. Generated samples have none."""
    if not isinstance(samples, MixtureSamples):
        return []
    digests = [_digest(member, own) for member, own in zip(samples.members, samples.statistics, strict=True)]
    if samples.fast is not None:
        for digest in digests:
            digest["fast_sha256"] = samples.fast.sha256
    return digests


def data_differences(saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line about each dataset that differs, such as `<path>: 100 episodes then, 101 now`.

    Keys that one of the digests lacks are not compared.
    """
    if len(saved) != len(current):
        yield f"{len(saved)} datasets then, {len(current)} now"
        return
    for then, now in zip(saved, current, strict=True):
        different = [key for key in (*_COUNTS, *_CONTENTS) if key in then and key in now and then[key] != now[key]]
        if different:
            key = different[0]
            text = (
                f"{then[key]:,} {_COUNTS[key]} then, {now[key]:,} now" if key in _COUNTS else f"{_CONTENTS[key]} have changed"
            )
            yield f"{now['dataset']}: {text}"


def digest_state_statistics(dataset: str, statistics: Statistics) -> dict[str, Any]:
    """Return the digest of the statistics of the state alone, to compare with that of a checkpoint."""
    return {"dataset": dataset, "state_statistics_sha256": _statistics_sha256({STATE: statistics.get(STATE, {})})}


def check_unchanged(
    checkpoint: Path, saved: Sequence[Mapping[str, Any]] | None, current: Sequence[Mapping[str, Any]], hint: str
) -> None:
    """Check that datasets are those that a checkpoint was trained on. One that states no digests is not checked.

    Args:
        saved: the digests that the checkpoint states.
        hint: what to do where they have changed.

    Raises:
        ConfigurationError: one of them has changed, naming what differs.
    """
    if saved is not None and (differences := list(data_differences(saved, current))):
        raise ConfigurationError([Problem(str(checkpoint), f"other data: {line}", hint) for line in differences])


def _digest(member: MixtureDataset, statistics: Statistics) -> DatasetDigest:
    selection = member.selection
    lengths = np.array([episode.length for episode in member.dataset.episodes], dtype=np.int64)
    segments = np.concatenate([selection.training, selection.validation])
    return {
        "dataset": member.settings.path,
        "episodes": selection.episodes,
        "frames": selection.frames,
        "kept_frames": selection.kept_frames,
        "validation_episodes": selection.validation_episodes,
        "episode_lengths_sha256": _sha256(lengths.astype("<i8").tobytes()),
        "kept_frames_sha256": _sha256(segments[np.argsort(segments[:, 0])].astype("<i8").tobytes()),
        "validation_frames_sha256": _sha256(selection.validation.astype("<i8").tobytes()),
        "statistics_sha256": _statistics_sha256(statistics),
        "state_statistics_sha256": _statistics_sha256({STATE: statistics.get(STATE, {})}),
    }


def _statistics_sha256(statistics: Statistics) -> str:
    return _sha256(_statistics_text(statistics).encode())


def _statistics_text(statistics: Statistics) -> str:
    """Return the statistics that normalise as text that is the same wherever they are computed."""
    lines = []
    for feature, values in sorted(statistics.items()):
        for name in sorted(_NORMALISING & values.keys()):
            try:
                numbers = np.asarray(values[name], dtype=np.float64).ravel()
            except (TypeError, ValueError):  # damaged: an error where it is used, which this policy may not do
                lines.append(f"{feature} {name} {values[name]!r}")
            else:
                lines.append(f"{feature} {name} {' '.join(f'{number:.{_DIGITS}g}' for number in numbers)}")
    return "\n".join(lines)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
