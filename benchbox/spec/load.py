"""Loading of a matrix file: a `Matrix`, or every problem of the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from benchbox.errors import ConfigurationError
from benchbox.registry.attention import default_attention
from benchbox.spec.cell import DataSpec, MeasureSpec
from benchbox.spec.checks import check_cells, check_structure
from benchbox.spec.data_checks import check_data
from benchbox.spec.datasets import DatasetSpec
from benchbox.spec.fields import POINT_TYPES
from benchbox.spec.files import MATRICES, TRAINING_FILES, find_file
from benchbox.spec.matrix import Axis, BatchSearch, Matrix
from benchbox.spec.optim_file import optim_spec
from benchbox.spec.overrides import apply_overrides
from benchbox.spec.policies import named_policies, resolve_policies
from benchbox.spec.problems import in_order, problems_of
from benchbox.spec.schema import DataFile, DatasetFile, MatrixFile, SearchFile
from benchbox.spec.source import read_source
from benchbox.spec.threshold_section import threshold_of
from benchbox.spec.training_keys import remove_training_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.registry.policies import PolicyEntry
    from benchbox.spec.source import Source


def load_matrix(path: str | Path, overrides: Mapping[str, str] | None = None, policy_dirs: Sequence[Path] = ()) -> Matrix:
    """Read and check a matrix file, by path or by name (see `find_file`). A training file is a matrix of one cell.

    `overrides` are dotted keys and YAML texts, as `parse_overrides` returns them.

    Raises:
        ConfigurationError: with every problem of the file, top to bottom, each at its line and column.
    """
    path = find_file(Path(path), MATRICES, TRAINING_FILES)
    source = read_source(path)
    overrides = overrides or {}
    problems = [*source.problems, *remove_training_keys(source, overrides), *apply_overrides(source, overrides)]
    policies, policy_dirs, unresolved = resolve_policies(source, path, policy_dirs)
    problems += unresolved
    try:
        parsed = MatrixFile.model_validate(source.values, context={"policies": policies})
    except ValidationError as error:
        problems += problems_of(error, MatrixFile, source, problems)
    problems += [*check_structure(source), *check_data(source)]
    if problems:
        raise ConfigurationError(in_order(problems))
    matrix = _matrix(parsed, path, source, policies, policy_dirs)
    if problems := check_cells(matrix, source, policies):
        raise ConfigurationError(in_order(problems))
    return matrix


def _matrix(
    parsed: MatrixFile, path: Path, source: Source, policies: Mapping[str, PolicyEntry], policy_dirs: Sequence[Path]
) -> Matrix:
    return Matrix(
        name=parsed.name,
        path=path,
        scalars=parsed.explicit_values(),
        axes=_axes(parsed, source.at(("axes",), {})),
        search=_search(parsed),
        include=tuple(point.explicit_values() for point in parsed.include),
        exclude=tuple(point.explicit_values() for point in parsed.exclude),
        data=data_spec(parsed.data),
        optim=optim_spec(parsed.optim),
        measure=MeasureSpec(**parsed.measure.model_dump()),
        reference=parsed.reference.explicit_values() if parsed.reference else {},
        thresholds=tuple(map(threshold_of, parsed.thresholds)),
        values=source.values,
        policy_dirs=tuple(policy_dirs),
        default_attention={name: default_attention(policies[name]) for name in named_policies(source)},
    )


def _axes(parsed: MatrixFile, in_file: Mapping[str, Any]) -> tuple[Axis, ...]:
    """Return the axes in the order of the file, which decides the order of cells."""
    axes = []
    extra = getattr(parsed.axes, "model_extra", None) or {}  # by names that are no fields, and may be those of methods
    for name in in_file:
        values = extra[name] if name in extra else getattr(parsed.axes, name)
        if isinstance(values, SearchFile):
            values = [values.start]
        points = [{name: value} for value in values] if name in POINT_TYPES else [point.explicit_values() for point in values]
        axes.append(Axis(name=name, points=tuple(points)))
    return tuple(axes)


def _search(parsed: MatrixFile) -> BatchSearch | None:
    batch = getattr(parsed.axes, "batch", None)
    return BatchSearch(start=batch.start, at_most=batch.at_most) if isinstance(batch, SearchFile) else None


def data_spec(data: str | DataFile) -> DataSpec:
    if isinstance(data, str):
        return DataSpec(kind=data)
    datasets = tuple(map(_dataset_spec, data.mixture or (() if data.lerobot is None else (data,))))
    plain = len(datasets) == 1 and datasets[0] == DatasetSpec(path=datasets[0].path)
    return DataSpec(
        kind="lerobot" if datasets else DataSpec().kind,
        path=datasets[0].path if plain else data.lerobot,
        workers=data.workers,
        tokenizer=data.tokenizer,
        decoder=data.decoder,
        block=data.block,
        buffer=data.buffer,
        datasets=() if plain else datasets,
        mode=data.mode,
        validation=data.validation,
    )


def _dataset_spec(dataset: DatasetFile) -> DatasetSpec:
    values = dataset.model_dump(include=dataset.model_fields_set & (DatasetFile.model_fields.keys() | {"weight"}))
    return DatasetSpec.from_dict({"path": values.pop("lerobot"), **values})
