"""matrix.yaml -> Matrix: typed, frozen, every error with file:line:column and a suggestion."""

from benchbox.spec.load import load_matrix
from benchbox.spec.matrix import Axis, Matrix
from benchbox.spec.overrides import parse_overrides

__all__ = ["Axis", "Matrix", "load_matrix", "parse_overrides"]
