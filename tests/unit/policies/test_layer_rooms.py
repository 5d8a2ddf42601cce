"""The folders of `policies/_layers` import one another in one direction only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

LAYERS = Path(__file__).parents[3] / "policies" / "_layers"
ALLOWED = {
    "nn": set(),
    "sequence": set(),
    "weights": set(),
    "cost": {"nn"},
    "families": {"nn", "sequence", "weights", "cost"},
}
MODULES = sorted(path.relative_to(LAYERS) for path in LAYERS.rglob("*.py"))


def runtime_imports(node: ast.AST) -> list[ast.ImportFrom]:
    """Return the relative imports that are not under `if TYPE_CHECKING:`."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        return [imported for statement in node.orelse for imported in runtime_imports(statement)]
    imports = [node] if isinstance(node, ast.ImportFrom) and node.level else []
    return imports + [imported for child in ast.iter_child_nodes(node) for imported in runtime_imports(child)]


def imported_modules(path: Path) -> set[tuple[str, ...]]:
    """Return the modules below `_layers` that a module imports, as path parts."""
    modules = set()
    for statement in runtime_imports(ast.parse((LAYERS / path).read_text())):
        base = path.parent.parts[: len(path.parent.parts) - (statement.level - 1)]
        assert len(path.parent.parts) >= statement.level - 1, f"{path} imports from outside _layers"
        module = (*base, *(statement.module or "").split(".")) if statement.module else base
        modules.add(module)
        modules.update((*module, alias.name) for alias in statement.names)
    return modules


def test_every_folder_has_a_direction() -> None:
    assert {path.parts[0] for path in MODULES if len(path.parts) > 1} == ALLOWED.keys()


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_only_from_folders_below_it(path: Path) -> None:
    """Modules outside the folders, such as `presets.py`, import from none of them."""
    folder = path.parts[0] if len(path.parts) > 1 else None
    imported = {module[0] for module in imported_modules(path) if module and module[0] in ALLOWED}
    assert imported - {folder} <= (ALLOWED[folder] if folder else set())


def test_no_two_modules_import_each_other() -> None:
    graph = {path.with_suffix("").parts: imported_modules(path) for path in MODULES}
    remaining = dict(graph)
    while leaves := [module for module, imports in remaining.items() if not imports & (remaining.keys() - {module})]:
        for module in leaves:
            del remaining[module]
    assert not remaining, "an import cycle"
