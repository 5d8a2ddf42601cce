"""Malicious files: no code in them is run, none takes the memory that it claims, and one line says why it is refused."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import datetime as dt
import decimal
import enum
import functools
import os
import pathlib
import pickle
import shutil
import struct
import subprocess
import types
import typing
import uuid
import zipfile

import pytest
import torch

from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import DataError
from tests.support.checkpoint_formats import (
    FORMATS,
    WEIGHTS,
    accelerate,
    bare_pickle,
    old_torch_file,
    refusal_line,
    shard_file,
    torch_file,
    zero,
)


class Attack:
    """An object whose pickle calls a function that leaves a file behind."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.fixture
def trap(tmp_path):
    return tmp_path / "was-run"


@pytest.fixture(params=["os.system", "subprocess.run", "eval", "os.mkdir", "shutil.copytree"])
def attack(request, trap):
    return {
        "os.system": Attack(os.system, f"touch {trap}"),
        "subprocess.run": Attack(subprocess.run, ["touch", str(trap)]),
        "eval": Attack(eval, f"open({str(trap)!r}, 'w')"),
        "os.mkdir": Attack(os.mkdir, str(trap)),
        "shutil.copytree": Attack(shutil.copytree, str(trap.parent), str(trap)),
    }[request.param]


@pytest.mark.parametrize("write", [old_torch_file, bare_pickle, accelerate, shard_file])
def test_a_refusal_has_no_advice_to_switch_safety_off(tmp_path, trap, write):
    line = refusal_line(write(tmp_path, Attack(os.system, f"touch {trap}")))
    assert "weights_only" not in line
    assert line.endswith(("it calls posix.system", "a pickle of other contents than tensors and plain containers"))


@pytest.mark.parametrize("write", FORMATS)
def test_a_program_in_a_checkpoint_is_refused_and_not_run(tmp_path, trap, attack, write):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    path = write(folder, attack)
    assert "a program" in refusal_line(path)
    assert not trap.exists()


def test_the_attacks_work_when_they_are_unpickled(attack, trap):
    if "copytree" not in str(attack._call[0]):  # it would copy the folder into itself
        pickle.loads(pickle.dumps(attack))
        assert trap.exists()


def test_functions_of_other_libraries_are_not_called_either(tmp_path, trap):
    """They are not in the list of code, so the file is read; the calls are not made."""
    from numpy import savetxt

    path = torch_file(tmp_path, Attack(savetxt, str(trap), [1.0]))
    (facts,) = read_checkpoint(path)
    assert [parameter.name for parameter in facts.parameters] == ["weight"]
    assert not trap.exists()


class Settings(dict):
    """A dictionary with attributes, as EasyDict makes them."""

    def __init__(self, **values):
        super().__init__(values)
        self.__dict__.update(values)


class Names(list):
    """A list of its own class."""


class Kind(enum.Enum):
    """An enumeration. Python 3.11 pickles its members as attributes of the class."""

    A = 1

    def __reduce_ex__(self, protocol):
        return getattr, (Kind, "A")


class Outer:
    """A class with another one inside."""

    class Inner:
        """A nested class."""


DATA = [
    *(True, 1.5, 1j, b"bytes", bytearray(b"a"), {1}, frozenset([1]), range(3), slice(1), object(), ...),
    *(bool, int, float, str, bytes, dict, list, tuple, set, object, type(None)),
    *(collections.defaultdict(list, a=[1]), collections.defaultdict(float), collections.deque([1, 2], 3)),
    *(collections.Counter("aab"), collections.OrderedDict(a=1), collections.ChainMap({"a": 1}), collections.UserDict(a=1)),
    *(dt.datetime.now(tz=dt.UTC), dt.timedelta(1), pathlib.Path("a"), decimal.Decimal("0.1")),
    *(argparse.Namespace(lr=1e-3), types.SimpleNamespace(lr=1e-3), uuid.uuid4()),
    *(typing.Any, typing.Optional[int], list[int], typing.Callable, collections.abc.Sequence[int]),  # noqa: UP045
    *(Settings(lr=1e-3, nested=Settings(a=1)), Names(["a"]), Kind.A, Outer.Inner(), functools.partial(torch_file, value=1)),
]


@pytest.mark.parametrize("value", DATA, ids=lambda value: type(value).__name__)
def test_data_of_the_standard_library_and_objects_of_any_class_are_read(tmp_path, value):
    (facts,) = read_checkpoint(torch_file(tmp_path, {"config": value}))
    assert [parameter.name for parameter in facts.parameters] == ["weight"]


def names_file(folder, *names):
    """Write a checkpoint whose pickle contains these names, each as `module name`."""
    path = torch_file(folder, list(names))
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            for full in names if name.endswith("data.pkl") else ():  # a global in place of a string
                string, (module, global_name) = b"X" + struct.pack("<I", len(full)) + full.encode(), full.split(" ")
                assert string in content
                content = content.replace(string, f"c{module}\n{global_name}\n".encode())
            archive.writestr(name, content)
    return path


CODE = [
    *("__builtin__ eval", "builtins exec", "builtins print", "builtins open", "builtins __import__", "builtins compile"),
    *("builtins eval.__call__", "builtins dict.fromkeys", "builtins setattr", "builtins delattr", "builtins super"),
    *("os system", "posix system", "nt system", "pathlib os", "pathlib os.system", "pathlib Path.write_text", "uuid os"),
    *("collections _sys", "collections _sys.modules", "datetime sys", "enum sys", "argparse FileType", "argparse _os"),
    *("types FunctionType", "types CodeType", "typing get_type_hints", "typing sys", "typing _eval_type", "typing re.compile"),
    *(
        "functools reduce",
        "functools partialmethod",
        "operator methodcaller",
        "_operator attrgetter",
        "importlib import_module",
    ),
    *("subprocess Popen", "shutil rmtree", "runpy run_path", "ctypes CDLL", "pickle loads", "marshal loads", "code interact"),
]


@pytest.mark.parametrize("name", CODE)
def test_a_name_of_the_standard_library_that_can_run_code_makes_a_file_a_program(tmp_path, name):
    assert "a program, not read and not run: it calls" in refusal_line(names_file(tmp_path, name))


def test_a_name_of_data_alone_makes_no_program(tmp_path):
    """The files of the test above differ from this one in nothing but the names."""
    read_checkpoint(names_file(tmp_path, "__builtin__ dict", "collections defaultdict", "pathlib Path", "foreign.library run"))


@pytest.mark.parametrize(
    "value",
    [
        functools.partial(print),
        functools.partial(functools.partial, eval),
        Attack(getattr, dict, "fromkeys"),
        Attack(getattr, Outer, "__init__"),
        Attack(getattr, Attack(Outer), "run"),
        Attack(type, "Made", (), {}),
    ],
    ids=["partial print", "partial eval", "method of data", "private", "method of an object", "new class"],
)
def test_helpers_of_pickles_are_refused_with_anything_but_data(tmp_path, value):
    assert "a program" in refusal_line(torch_file(tmp_path, value))


HUGE = 10**12  # elements: no machine of the tests has the memory


@pytest.mark.parametrize("write", [torch_file, old_torch_file, accelerate, zero])
def test_a_view_that_repeats_one_number_is_refused_by_its_size(tmp_path, write):
    """Its values would take 4 TB: without the check, reading them ends in an error of the allocator at best."""
    path = write(tmp_path, torch.zeros(1).expand(HUGE))
    assert f"the largest of {4 * HUGE}: not read" in refusal_line(path)


def test_a_shard_that_repeats_one_number_is_refused_by_its_size(tmp_path):
    assert f"the largest of {4 * HUGE}: not read" in refusal_line(shard_file(tmp_path, torch.zeros(1).expand(HUGE)))


def test_many_views_of_one_number_are_refused_by_the_sum_of_their_sizes(tmp_path):
    path = torch_file(tmp_path, [torch.zeros(1).expand(2**20) for _ in range(100)])
    assert "claims tensors of 41943" in refusal_line(path)


def test_weights_that_are_tied_or_expanded_in_a_small_way_are_read(tmp_path):
    weight = torch.ones(4, 4)
    torch.save({"model": {"a": weight, "b": weight, "positions": torch.arange(64).expand(1000, -1)}}, tmp_path / "a.pt")
    (facts,) = read_checkpoint(tmp_path / "a.pt")
    assert {"a", "b"} <= {parameter.name for parameter in facts.parameters}


def test_an_archive_that_unpacks_to_more_than_it_holds_is_refused_by_its_size(tmp_path):
    """One member is 80 MB of a single letter; `torch.save` never packs."""
    torch.save({"model": WEIGHTS}, tmp_path / "plain.pt")
    bomb = tmp_path / "bomb.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as packed:
        for member in plain.infolist():
            packed.writestr(member.filename, plain.read(member))
        packed.writestr("plain/extra", b"a" * 80_000_000)
    assert bomb.stat().st_size < 100_000
    assert "bytes that unpack to 8000" in refusal_line(bomb)


def test_metadata_leads_to_no_file_outside_the_folder(tmp_path):
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    torch.save(1e-3, tmp_path / "secret.pt")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    shard_file(folder, 1e-3)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = metadata.storage_data
    metadata.storage_data[index] = _StorageInfo("../secret.pt", 0, (tmp_path / "secret.pt").stat().st_size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DataError, match=r"checkpoint/secret.pt: is missing"):
        read_checkpoint(folder)


def test_latest_leads_to_no_folder_outside(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    zero(outside, None)
    (inside / "latest").write_text("../outside/global_step1")
    with pytest.raises(DataError, match="holds no checkpoint"):
        read_checkpoint(inside)
