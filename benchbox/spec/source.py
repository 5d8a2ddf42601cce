"""A YAML file as plain values that remember where they stand.

The file is composed to nodes and walked here rather than constructed by the library, because only the nodes know lines and
columns, and because a walk can go on after the first mistake: every problem of a file is found in one reading.
"""

from __future__ import annotations

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

Keys = tuple[str | int, ...]  # the way to a value: keys and list positions from the root

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000  # after aliases are expanded: nine lines of aliases can otherwise stand for 10^9 values
MAX_DEPTH = 50
SCALARS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null")}
CONTAINERS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


@dataclass(slots=True)
class Source:
    """The values of a file, the place of each value and key, and what was wrong with the text itself."""

    label: str
    values: Any = None
    places: dict[Keys, str] = field(default_factory=dict)  # of values
    key_places: dict[Keys, str] = field(default_factory=dict)  # of the key that leads to a value
    problems: list[Problem] = field(default_factory=list)

    def where(self, path: Keys, *, key: bool = False) -> str:
        """The place of a value (or of its key), or of the nearest thing around it that is in the file."""
        if key and path in self.key_places:
            return self.key_places[path]
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.label)

    def at(self, path: Keys, default: Any = None) -> Any:
        """The value at a path of mapping keys and places in lists, or the default."""
        value = self.values
        for key in path:
            keys = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
            if key not in keys:
                return default
            value = value[key]
        return value

    def graft(self, path: Keys, other: Source) -> None:
        """Put the values of `other` at `path`, with their places, instead of what is there; null takes the key out.

        What leads to `path` must be mappings, or absent.
        """
        for places in (self.places, self.key_places):
            for old in [old for old in places if old[: len(path)] == path]:
                del places[old]
        at = self.values
        for depth, key in enumerate(path[:-1], start=1):
            self.places.setdefault(path[:depth], other.places[()])
            self.key_places.setdefault(path[:depth], other.places[()])
            at = at.setdefault(key, {})
        if other.values is None:
            at.pop(path[-1], None)
            return
        at[path[-1]] = other.values
        self.key_places[path] = other.places[()]
        self.places.update({path + inner: place for inner, place in other.places.items()})
        self.key_places.update({path + inner: place for inner, place in other.key_places.items()})


def read_source(path: Path) -> Source:
    """Read a YAML file whose root is a mapping.

    Raises:
        ConfigurationError: there is no such file, it cannot be read, is not text, not YAML, or not a mapping.
    """
    label = str(path)
    try:
        if path.is_dir():
            raise ConfigurationError(Problem(label, "is a directory", _yaml_files_in(path)))
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        siblings = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise ConfigurationError(Problem(label, "no such file", did_you_mean(label, siblings) or None)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigurationError(Problem(label, f"cannot be read: {getattr(error, 'strerror', None) or error}")) from None
    if len(raw) > MAX_BYTES:
        raise ConfigurationError(Problem(label, f"is larger than {MAX_BYTES >> 20} MiB", "a page of YAML is meant"))
    source = parse(_text(raw, label), label)
    if not isinstance(source.values, dict):
        found = "is empty" if source.values is None else "is not a mapping"
        raise ConfigurationError([*source.problems, Problem(f"{label}:1:1", found, "start with 'name: ...'")])
    return source


def parse(text: str, label: str, *, place: str | None = None) -> Source:
    """Values of a YAML text. `place` is where everything stands when lines and columns mean nothing, as on a command line.

    Raises:
        ConfigurationError: the text is not one YAML document. Duplicate keys and the like are listed in `problems` instead.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.max_depth = MAX_DEPTH
    try:
        root = yaml.compose(text)
    except YAMLError as error:
        raise ConfigurationError(_not_yaml(error, text, label, place)) from None
    walk = _Walk(yaml, Source(label), place)
    walk.source.places[()] = place or f"{label}:1:1"
    walk.source.values = None if root is None else walk.value(root, ())
    return walk.source


class _Walk:
    """From nodes to values, keeping places and collecting problems."""

    def __init__(self, yaml: YAML, source: Source, place: str | None) -> None:
        self.yaml, self.source, self.place = yaml, source, place
        self.seen = 0
        self.open: list[Node] = []  # the nodes around the present one: an alias to one of them has no end

    def where(self, node: Node) -> str:
        return self.place or f"{self.source.label}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"

    def problem(self, node: Node, message: str, hint: str | None = None) -> None:
        self.source.problems.append(Problem(self.where(node), message, hint))

    def value(self, node: Node, path: Keys) -> Any:
        self.source.places[path] = self.where(node)
        self.seen += 1
        if self.seen > MAX_VALUES or any(node is outer for outer in self.open):
            message = f"aliases expand to more than {MAX_VALUES} values" if self.seen > MAX_VALUES else "alias to itself"
            # The walk ends here: beyond this point there is no end of it.
            raise ConfigurationError([*self.source.problems, Problem(self.where(node), message, "write the values out")])
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        if str(node.tag) not in CONTAINERS:
            self.problem(node, f"tag {node.tag} has no meaning here", "remove it")
        self.open.append(node)
        values: Any
        if isinstance(node, MappingNode):
            values = self.mapping(node, path)
        else:
            values = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        self.open.pop()
        return values

    def scalar(self, node: ScalarNode) -> Any:
        if str(node.tag) not in SCALARS:
            self.problem(node, f"{node.value!r} reads as a {str(node.tag).rpartition(':')[2]}", "put it in quotes")
            return node.value
        try:
            return self.yaml.constructor.construct_object(node)
        except (YAMLError, ValueError, LookupError, OverflowError):  # a tag such as !!int lets any text reach the conversion
            self.problem(node, f"{node.value[:40]!r} cannot be read as {str(node.tag).rpartition(':')[2]}")
            return node.value

    def mapping(self, node: MappingNode, path: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if str(key_node.tag).endswith(":merge"):
                self.problem(key_node, "merge keys (<<) are not read", "write the keys out")
            elif not isinstance(key_node, ScalarNode) or not str(key_node.tag).endswith(":str"):
                shown = repr(key_node.value) if isinstance(key_node, ScalarNode) else "a collection"
                self.problem(key_node, f"a key must be text, not {shown}", "put it in quotes" if shown[0] == "'" else None)
            elif key_node.value in values:
                first = self.source.key_places[(*path, key_node.value)]
                self.problem(key_node, f"duplicate key {key_node.value!r}", f"it is already at {first}")
            else:
                self.source.key_places[(*path, key_node.value)] = self.where(key_node)
                values[key_node.value] = self.value(value_node, (*path, key_node.value))
                if values[key_node.value] is None:  # nothing after the colon stands where the next token does
                    self.source.places[(*path, key_node.value)] = self.where(key_node)
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


def _not_yaml(error: YAMLError, text: str, label: str, place: str | None) -> Problem:
    mark = getattr(error, "problem_mark", None)
    offset = getattr(error, "position", None)  # of a character YAML does not allow
    line, column = (mark.line, mark.column) if mark else (0, 0)
    if mark is None and isinstance(offset, int):
        line, column = text.count("\n", 0, offset), offset - (text.rfind("\n", 0, offset) + 1)
    if isinstance(error, MaxDepthExceededError):
        what = f"nested deeper than {MAX_DEPTH}"
    else:
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
    hint = "indent with spaces" if "'\\t'" in what else None
    return Problem(place or f"{label}:{line + 1}:{column + 1}", f"not YAML: {what}", hint)


def _yaml_files_in(folder: Path) -> str:
    names = sorted(str(path) for path in folder.glob("*.y*ml"))[:5]
    return "it holds " + ", ".join(names) if names else "name a matrix file"
