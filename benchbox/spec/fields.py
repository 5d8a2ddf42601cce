"""A point of a matrix: some of the fields of a cell. It is generated from the declarations of `Cell`."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any, Union, get_args

from pydantic import Field, create_model

from benchbox.spec.cell import POINT_FIELDS
from benchbox.spec.types import ABSENT, Strict


def _type_in_file(annotation: Any) -> Any:
    """Return the type that a field of a cell has in a file: there a field without a value is absent, and never null."""
    members = get_args(annotation)
    if NoneType not in members:
        return annotation
    return Union[tuple(member for member in members if member is not NoneType)]  # noqa: UP007 (built at run time)


POINT_TYPES: dict[str, Any] = {field.name: _type_in_file(field.type) for field in POINT_FIELDS}


class PointBase(Strict):
    """Base of `Point`."""

    def explicit_values(self) -> dict[str, Any]:
        """Return the fields that the file sets."""
        return {name: getattr(self, name) for name in POINT_TYPES if name in self.model_fields_set}


if TYPE_CHECKING:
    Point = PointBase
else:
    Point = create_model(
        "Point",
        __base__=PointBase,
        __doc__="Some of the fields of a cell: the top level, a point of a zipped axis, of `include`, `exclude` or `where`.",
        **{
            field.name: (POINT_TYPES[field.name], Field(default=ABSENT, description=field.metadata["description"]))
            for field in POINT_FIELDS
        },
    )
