"""YAML files as plain values with the position, `file:line:column`, of each value.

The file is composed to nodes and walked here rather than constructed by the library, because only the nodes know lines and
columns, and because a walk can go on after the first mistake: every problem of a file is found in one reading.
"""

from __future__ import annotations

import re
import stat
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import MaxDepthExceededError
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from benchbox.errors import ConfigurationError, Problem
from benchbox.registry.names import did_you_mean

if TYPE_CHECKING:
    from pathlib import Path

Keys = tuple[str | int, ...]  # the path of a value: keys and list indices from the root

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000  # after aliases are expanded: nine lines of aliases can otherwise stand for 10^9 values
MAX_DEPTH = 50
SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}
_UNTAGGED = {f"tag:yaml.org,2002:{name}" for name in ("timestamp", "value")}  # what YAML reads of some plain texts
CONTAINERS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


@dataclass(slots=True)
class Source:
    """The values of a file, the position of each value and key, and the problems of the text itself."""

    label: str
    values: Any = None
    positions: dict[Keys, str] = field(default_factory=dict)  # of values
    key_positions: dict[Keys, str] = field(default_factory=dict)  # of the key of a value
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: Keys, *, key: bool = False) -> str:
        """Return the position of a value (or of its key), or of the nearest value around it that is in the file."""
        if key and path in self.key_positions:
            return self.key_positions[path]
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, self.label)

    def at(self, path: Keys, default: Any = None) -> Any:
        """Return the value at a path of mapping keys and list indices, or the default."""
        value = self.values
        for key in path:
            keys = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
            if key not in keys:
                return default
            value = value[key]
        return value

    def graft(self, path: Keys, source: Source) -> None:
        """Replace the value at `path` by those of another source, with their positions; null removes the key.

        All values on the way to `path` must be mappings, or absent.
        """
        if source.values is None and self.at(path[:-1], default=None) is None:
            return  # nor is what would hold it
        for positions in (self.positions, self.key_positions):
            for old in [old for old in positions if old[: len(path)] == path]:
                del positions[old]
        parent = self.values
        for depth, key in enumerate(path[:-1], start=1):
            self.positions.setdefault(path[:depth], source.positions[()])
            self.key_positions.setdefault(path[:depth], source.positions[()])
            parent = parent.setdefault(key, {})
        if source.values is None:
            parent.pop(path[-1], None)
            return
        parent[path[-1]] = source.values
        self.key_positions[path] = source.positions[()]
        self.positions.update({path + inner: position for inner, position in source.positions.items()})
        self.key_positions.update({path + inner: position for inner, position in source.key_positions.items()})


def read_source(path: Path, *, beginning: str = "name: ...") -> Source:
    """Read a YAML file whose root is a mapping. `beginning` is what such a file starts with.

    Raises:
        ConfigurationError: there is no such regular file, it cannot be read, is not text, not YAML, or not a mapping.
    """
    label = str(path)
    try:
        if path.is_dir():
            raise ConfigurationError(Problem(label, "is a directory", _yaml_files_in(path)))
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise ConfigurationError(Problem(label, "is not a regular file", "save it as one"))
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        siblings = [str(sibling) for sibling in yaml_files(path.parent)]
        raise ConfigurationError(Problem(label, "no such file", did_you_mean(label, siblings) or None)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigurationError(Problem(label, f"cannot be read: {getattr(error, 'strerror', None) or error}")) from None
    if len(raw) > MAX_BYTES:
        raise ConfigurationError(Problem(label, f"is larger than {MAX_BYTES >> 20} MiB", "a page of YAML is meant"))
    source = parse(_text(raw, label), label)
    if not isinstance(source.values, dict):
        problem = "is empty" if source.values is None else "is not a mapping"
        raise ConfigurationError([*source.problems, Problem(f"{label}:1:1", problem, f"start with '{beginning}'")])
    return source


def parse(text: str, label: str, *, position: str | None = None) -> Source:
    """Parse a YAML text. `position` is that of every value where lines and columns mean nothing, as on a command line.

    Raises:
        ConfigurationError: the text is not one YAML document. Duplicate keys and the like are listed in `problems` instead.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    try:
        root = yaml.compose(text)
    except YAMLError as error:
        raise ConfigurationError(_not_yaml(error, text, label, position)) from None
    except (KeyError, AssertionError, ValueError):  # ruamel.yaml has no errors of its own for these
        raise ConfigurationError(_unknown_version_or_character(text, label, position)) from None
    reader = _NodeReader(yaml, Source(label), position)
    reader.source.positions[()] = position or f"{label}:1:1"
    reader.source.values = None if root is None else reader.value(root, ())
    return reader.source


class _NodeReader:
    """Reader of YAML nodes that records positions and collects problems."""

    def __init__(self, yaml: YAML, source: Source, position: str | None) -> None:
        self.yaml, self.source, self.position = yaml, source, position
        self.value_count = 0
        self.ancestors: list[Node] = []  # of the present node: an alias to one of them would never end

    def where(self, node: Node) -> str:
        return self.position or f"{self.source.label}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def problem(self, node: Node, message: str, hint: str | None = None) -> None:
        self.source.problems.append(Problem(self.where(node), message, hint))

    def value(self, node: Node, path: Keys) -> Any:
        self.source.positions[path] = self.where(node)
        self.value_count += 1
        message = None
        if self.value_count > MAX_VALUES:
            message = f"aliases expand to more than {MAX_VALUES} values"
        elif any(node is ancestor for ancestor in self.ancestors):
            message = "alias to itself"
        elif len(self.ancestors) > MAX_DEPTH:
            message = f"aliases nest deeper than {MAX_DEPTH}"
        if message is not None:  # reading stops here, since it would never end
            raise ConfigurationError([*self.source.problems, Problem(self.where(node), message, "write the values out")])
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        if str(node.tag) not in CONTAINERS:
            self.problem(node, f"tag {node.tag} has no meaning here", "remove it")
        self.ancestors.append(node)
        values: Any
        if isinstance(node, MappingNode):
            values = self.mapping(node, path)
        else:
            values = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        self.ancestors.pop()
        return values

    def scalar(self, node: ScalarNode) -> Any:
        if str(node.tag) in _UNTAGGED:
            self.problem(node, f"{node.value!r} reads as a {str(node.tag).rpartition(':')[2]}", "put it in quotes")
            return node.value
        if str(node.tag) not in SCALARS:
            self.problem(node, f"tag {node.tag} has no meaning here", "remove it")
            return node.value
        try:
            value = self.yaml.constructor.construct_object(node)
            str(value)  # an integer of thousands of hexadecimal digits cannot be printed
        except (YAMLError, ValueError, LookupError, OverflowError):  # a tag such as !!int lets any text reach the conversion
            self.problem(node, f"{node.value[:40]!r} cannot be read as {str(node.tag).rpartition(':')[2]}")
            return node.value
        return value

    def mapping(self, node: MappingNode, path: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if str(key_node.tag).endswith(":merge"):
                self.problem(key_node, "merge keys (<<) are not read", "write the keys out")
            elif not isinstance(key_node, ScalarNode) or not str(key_node.tag).endswith(":str"):
                if key_node.value == "":
                    self.problem(key_node, "a key is empty", "write one before the colon")
                    continue
                key = repr(key_node.value) if isinstance(key_node, ScalarNode) else "a collection"
                self.problem(key_node, f"a key must be text, not {key}", "put it in quotes" if key[0] == "'" else None)
            elif key_node.value in values:
                first_position = self.source.key_positions[(*path, key_node.value)]
                self.problem(key_node, f"duplicate key {key_node.value!r}", f"it is already at {first_position}")
            else:
                self.source.key_positions[(*path, key_node.value)] = self.where(key_node)
                values[key_node.value] = self.value(value_node, (*path, key_node.value))
                if values[key_node.value] is None:  # YAML places an empty value at the next token
                    self.source.positions[(*path, key_node.value)] = self.where(key_node)
        return values


def _text(raw: bytes, label: str) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(Problem(f"{label}:{line}:1", "is not UTF-8 text", "a YAML file is meant")) from None
    if "\0" in text:
        raise ConfigurationError(Problem(f"{label}:1:1", "is a binary file", "a YAML file is meant"))
    return text


def _unknown_version_or_character(text: str, label: str, position: str | None) -> Problem:
    version = re.search(r"^%YAML.*", text, re.MULTILINE)
    characters = re.finditer(r"\\U([0-9A-Fa-f]{8})", text)
    match = version or next((character for character in characters if int(character[1], 16) > sys.maxunicode), None)
    start = match.start() if match else 0
    where = position or f"{label}:{text.count(chr(10), 0, start) + 1}:{start - text.rfind(chr(10), 0, start)}"
    if version:
        return Problem(where, f"not YAML: unknown version {version[0][5:].strip()}", "write %YAML 1.2, or remove the line")
    if match:
        return Problem(where, "not YAML: there is no such character", "write it as itself")
    return Problem(where, "not YAML")


def _not_yaml(error: YAMLError, text: str, label: str, position: str | None) -> Problem:
    mark = getattr(error, "problem_mark", None)
    offset = getattr(error, "position", None)  # of a character that YAML does not allow
    line, column = (mark.line, mark.column) if mark else (0, 0)
    if mark is None and isinstance(offset, int):
        line, column = text.count("\n", 0, offset), offset - (text.rfind("\n", 0, offset) + 1)
    if isinstance(error, MaxDepthExceededError):
        problem = f"nested deeper than {MAX_DEPTH}"
    else:
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        if problem.startswith("but "):  # the end of a sentence
            problem = f"{getattr(error, 'context', '')}, {problem}"
    hint = "indent with spaces" if "'\\t'" in problem else None
    return Problem(position or f"{label}:{line + 1}:{column + 1}", f"not YAML: {problem}", hint)


def yaml_files(folder: Path) -> list[Path]:
    """Return the YAML files in a folder that a user may mean, sorted: those of tools are hidden."""
    return sorted(path for path in folder.glob("*.y*ml") if not path.name.startswith(".")) if folder.is_dir() else []


def _yaml_files_in(folder: Path) -> str:
    names = [str(path) for path in yaml_files(folder)[:5]]
    return "it holds " + ", ".join(names) if names else "name a YAML file"
