"""Fingerprints of the sources of benchbox, of a policy and of data: a record is valid only for what it was measured with.

A report names the sources that rendered it: others may judge the same records otherwise.
"""

from __future__ import annotations

import ast
import hashlib
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchbox.registry.policies import PACKAGE, policy_entry, search_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchbox.spec.cell import DataSpec

    Module = tuple[str, ...]  # dotted name below `PACKAGE`, split: ("_layers", "nn", "rope")
    Import = tuple[int, Module, Module]  # level of a relative import, module, imported names
    _ModuleFiles = tuple[Path | None, Sequence[Path]]  # file of a module, and the folders of its submodules

_BENCHBOX = Path(__file__).resolve().parent.parent

# A launch imports nothing from these folders, and policies have a fingerprint of their own. Everything else counts: following
# imports would miss backends, which are imported by a computed name.
_NOT_IN_A_LAUNCH = {"__main__.py", "_bundled", "analysis", "api", "cli", "plan", "report", "simulation"}

_OF_REPORTS = ("analysis", "registry", "report", "spec", "store", "theory")  # folders that decide what a report says


@cache
def benchbox_sha256() -> str:
    """Return the SHA-256 of the files of the benchbox package that a launch may use, the sample dataset included.

    They are read once per process: when they change during a run, its later records have the old fingerprint, and are measured
    again by the next run.
    """
    files = {path.relative_to(_BENCHBOX).as_posix(): path for path in _folder_files(_BENCHBOX)}
    return _sha256({label: path for label, path in files.items() if label.split("/")[0] not in _NOT_IN_A_LAUNCH})


@cache
def report_sha256() -> str:
    """Return the SHA-256 of the files of the benchbox package that decide what a report says of its records."""
    files = (path for folder in _OF_REPORTS for path in _folder_files(_BENCHBOX / folder))
    return _sha256({path.relative_to(_BENCHBOX).as_posix(): path for path in files})


def policy_sha256(name: str, policy_dirs: Sequence[Path] = ()) -> str:
    """Return the SHA-256 of all files in a policy's folder and of the policy modules that it imports, directly or indirectly.

    Imports are read from the source and nothing is executed. Imports inside functions and the `__init__.py` of parent packages
    count, imports under `if TYPE_CHECKING:` and imports of other packages do not. A module that is imported by a computed name
    cannot be found. The fingerprint does not depend on the location of the folders. A folder that an adapter builds from counts
    with all its files.

    Raises:
        ConfigurationError: the policy does not exist.
    """
    entry = policy_entry(name, policy_dirs)
    module = tuple(entry.module.split("."))
    files = {f"{'/'.join(module)}/{path.relative_to(entry.folder).as_posix()}": path for path in _folder_files(entry.folder)}
    files |= _imported_files((*module, "policy"), search_path(policy_dirs))
    if entry.source is not None and Path(entry.source).is_dir():
        source = Path(entry.source)
        files |= {f"{name.partition(':')[0]}:/{path.relative_to(source).as_posix()}": path for path in _folder_files(source)}
    return _sha256(files)


def data_sha256(data: DataSpec) -> str | None:
    """Return the SHA-256 of the metadata of datasets, of the frames to keep and of the tokenizer; None where no file is named.

    The metadata have the episodes, their lengths, tasks and statistics. Tables and videos, which may be terabytes, do not
    count, nor does the location of a dataset.
    """
    files: dict[str, Path] = {}
    for number, dataset in enumerate(data.lerobot_datasets):
        root = Path(dataset.path)
        metadata = (path for path in _folder_files(root / "meta") if not path.name.startswith("benchbox_"))  # ours, beside
        files |= {f"{number}/{path.relative_to(root).as_posix()}": path for path in metadata}
        if dataset.keep is not None:
            files[f"{number}/keep"] = Path(dataset.keep)
    if (tokenizer := data.tokenizer_file) is not None:
        files["tokenizer"] = tokenizer
    files = {label: path for label, path in files.items() if path.is_file()}
    return _sha256(files) if files else None


def _sha256(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the labels and contents of files."""
    digest = hashlib.sha256()
    for label, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{label}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _folder_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def _imported_files(root: Module, folders: Sequence[Path]) -> dict[str, Path]:
    """Return the files of a module and of everything it imports from `PACKAGE`, by their paths below it."""
    files: dict[str, Path] = {}
    pending, visited = [root], {root}
    places: dict[Module, _ModuleFiles] = {(): (None, folders)}
    while pending:
        module = pending.pop()
        path, _ = _find(module, places)
        if path is None:  # a namespace package, an imported name that is no module, or an import that fails
            continue
        is_package = path.name == "__init__.py"
        files["/".join((*module, path.name) if is_package else (*module[:-1], path.name))] = path
        package = module if is_package else module[:-1]
        for imported in _resolve(_read_imports(path.read_bytes()), package):
            for length in range(1, len(imported) + 1):
                if (ancestor := imported[:length]) not in visited:
                    visited.add(ancestor)
                    pending.append(ancestor)
    return files


def _find(module: Module, places: dict[Module, _ModuleFiles]) -> _ModuleFiles:
    """Return the file that Python would import for a module, or None if there is no such file, and where its submodules are.

    Args:
        places: of modules that were found before, and of the root.
    """
    if module not in places:
        _, folders = _find(module[:-1], places)
        part = module[-1]
        candidates = (file for folder in folders for file in (folder / part / "__init__.py", folder / f"{part}.py"))
        path = next((file for file in candidates if file.is_file()), None)
        if path is None:  # a namespace package, which extends over all folders
            folders = [folder / part for folder in folders]
        elif path.name == "__init__.py":
            folders = [path.parent]
        else:  # a module has no submodules
            folders = []
        places[module] = path, folders
    return places[module]


def _resolve(imports: Sequence[Import], package: Module) -> Iterator[Module]:
    """Yield the modules below `PACKAGE` that a module of this package may import: an imported name may be a module or not."""
    for level, module, names in imports:
        if level == 0:
            if module[0] != PACKAGE:
                continue
            base = module[1:]
        elif level - 1 <= len(package):
            base = (*package[: len(package) - (level - 1)], *module)
        else:
            continue
        yield base
        yield from ((*base, name) for name in names)


@lru_cache(maxsize=512)
def _read_imports(source: bytes) -> tuple[Import, ...]:
    """Parse the import statements of a source file; one that cannot be parsed has none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ()
    return tuple(_imports(tree))


def _imports(node: ast.AST) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield 0, tuple(alias.name.split(".")), ()
    elif isinstance(node, ast.ImportFrom):
        module = tuple(node.module.split(".")) if node.module else ()
        yield node.level, module, tuple(alias.name for alias in node.names)
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        for statement in node.orelse:
            yield from _imports(statement)
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                yield from _imports(child)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )
