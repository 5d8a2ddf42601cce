"""Floors of the package and the imports between its top-level folders.

Floors come from the layers contract in pyproject.toml, imports from the source files: they are parsed, never imported.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Edge = tuple[str, str]  # importing folder, imported folder


@dataclass(frozen=True, slots=True)
class ImportGraph:
    """Folders by floor, the highest floor first, and the imports between folders."""

    floors: tuple[tuple[str, ...], ...]
    imports: frozenset[Edge]
    torch_free: frozenset[str]

    def floor_of(self, folder: str) -> int:
        return next(number for number, folders in enumerate(self.floors) if folder in folders)

    def direct_imports(self) -> list[Edge]:
        """Return the transitive reduction, sorted: without the imports that a path through another folder implies."""
        return sorted(edge for edge in self.imports if not self._has_detour(edge))

    def _has_detour(self, edge: Edge) -> bool:
        source, target = edge
        pending = [imported for folder, imported in self.imports if folder == source and imported != target]
        visited = set()
        while pending:
            folder = pending.pop()
            if folder == target:
                return True
            if folder not in visited:
                visited.add(folder)
                pending += [imported for importing, imported in self.imports if importing == folder]
        return False


def read_import_graph(root: Path) -> ImportGraph:
    """Read the graph of the package in `root`.

    Raises:
        ValueError: a folder is in no layer of the contract, or an import goes up.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    package: str = settings["root_package"]
    layers = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    floors = tuple(tuple(folder.strip() for folder in layer.split("|")) for layer in layers)
    torch_free = frozenset(_torch_free_modules(settings["contracts"]))
    graph = ImportGraph(floors, frozenset(_read_imports(root / package)), torch_free)
    folders = {folder for floor in floors for folder in floor}
    for source, target in sorted(graph.imports):
        if missing := {source, target} - folders:
            raise ValueError(f"{', '.join(sorted(missing))} is in no layer of [tool.importlinter] in pyproject.toml")
        if graph.floor_of(source) >= graph.floor_of(target):
            raise ValueError(f"{package}.{source} imports {package}.{target}, which is not on a lower floor")
    return graph


def _torch_free_modules(contracts: list[dict[str, Any]]) -> Iterator[str]:
    for contract in contracts:
        if contract["type"] == "forbidden" and "torch" in contract["forbidden_modules"]:
            yield from (module.partition(".")[2] for module in contract["source_modules"])


def _read_imports(package: Path) -> Iterator[Edge]:
    for path in sorted(package.rglob("*.py")):
        source = path.relative_to(package).with_suffix("").parts[0]
        for module in _imported_modules(ast.parse(path.read_text(encoding="utf-8"))):
            root, _, inside = module.partition(".")
            target = inside.partition(".")[0]
            exists = (package / target).is_dir() or (package / f"{target}.py").is_file()
            if root == package.name and target and target != source and exists:
                yield source, target


def _imported_modules(node: ast.AST) -> Iterator[str]:
    """Yield the absolute names of imported modules and attributes, without those of `if TYPE_CHECKING:`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    is_for_types = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    children = node.orelse if isinstance(node, ast.If) and is_for_types else ast.iter_child_nodes(node)
    for child in children:
        yield from _imported_modules(child)
