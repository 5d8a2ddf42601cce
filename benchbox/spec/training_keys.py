"""Training files as matrices of one cell: `benchbox run` measures the set-up that `benchbox train` trains with."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from pydantic import ValidationError

from benchbox.errors import ConfigurationError, Problem
from benchbox.spec.fields import POINT_TYPES
from benchbox.spec.problems import problems_of
from benchbox.spec.schema import MatrixFile, NamedFile
from benchbox.spec.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_MATRICES = MatrixFile.model_fields.keys() - NamedFile.model_fields.keys()


def refuse_matrix(source: Source) -> None:
    """Raise ConfigurationError for a file without `steps` and with a key that only matrices have."""
    key = next((key for key in source.values if key in _OF_MATRICES), None)
    if "steps" not in source.values and key is not None:
        message = f"a matrix, as it has {key} and no steps, and not a training file"
        command = shlex.join(["benchbox", "run", source.label])
        raise ConfigurationError(Problem(source.where((key,), key=True), message, f"measure it with {command}"))


def remove_training_keys(source: Source, override_keys: Iterable[str]) -> list[Problem]:
    """Make a training file a matrix of its cell. Return the problems of the keys that only training needs.

    A file that has `steps`, and no key that only matrices have, is a training file. A field that an override makes an axis
    (`axes.batch`) is removed from the top level, where a training file must have it. Other files are left unchanged.
    """
    from benchbox.spec.train import TrainFile  # it imports the loader, which imports this module

    if "steps" not in source.values or _OF_MATRICES & source.values.keys():
        return []
    of_training = TrainFile.model_fields.keys() - NamedFile.model_fields.keys()
    values = {key: value for key, value in source.values.items() if key in of_training}
    problems: list[Problem] = []
    try:
        TrainFile.model_validate({"name": "unnamed", **values})
    except ValidationError as error:
        problems = problems_of(error, TrainFile, source, source.problems)
    axes = {key.removeprefix("axes.") for key in override_keys if key.startswith("axes.")} & POINT_TYPES.keys()
    for key in [*values, *axes]:
        if key in source.values:
            source.graft((key,), Source(source.label))  # removes it
    return problems
