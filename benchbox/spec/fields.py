"""A point of a matrix: some of the fields of a cell. It is generated from the declarations of `Cell`."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any, Union, get_args

from pydantic import Field, create_model

from benchbox.spec.cell import POINT_FIELDS
from benchbox.spec.types import ABSENT, Strict

# The type that each field of a cell has in a file: a field without a value is absent there, so None is not among its values.
POINT_TYPES: dict[str, Any] = {
    field.name: Union[tuple(part for part in get_args(field.type) if part is not NoneType)]  # noqa: UP007 (built at run time)
    if NoneType in get_args(field.type)
    else field.type
    for field in POINT_FIELDS
}


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
