"""Tests of malicious and damaged files: no code in them is run, and one line says what is wrong."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import datetime as dt
import decimal
import enum
import functools
import io
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
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as dcp

from benchbox.audit.subjects.checkpoint import read_checkpoint
from benchbox.errors import EXIT_USAGE, DataError

WEIGHTS = {"weight": torch.ones(2, 2)}
EMPTY_OPTIMIZER = {"state": {}, "param_groups": []}


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


def torch_file(folder, value):
    torch.save({"model": WEIGHTS, "extra": value}, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def old_torch_file(folder, value):
    torch.save({"model": WEIGHTS, "extra": value}, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def bare_pickle(folder, value):
    (folder / "checkpoint.bin").write_bytes(pickle.dumps({"model": 1, "extra": value}))
    return folder / "checkpoint.bin"


def accelerate(folder, value):
    save_file(WEIGHTS, folder / "model.safetensors")
    torch.save(EMPTY_OPTIMIZER | {"extra": value}, folder / "optimizer.bin")
    return folder


def zero(folder, value):
    (folder / "latest").write_text("global_step1")
    step = folder / "global_step1"
    step.mkdir()
    torch.save({"module": WEIGHTS, "param_shapes": [{"weight": torch.Size([2, 2])}], "dp_world_size": 1}, step / zero_model())
    states = {"base_optimizer_state": EMPTY_OPTIMIZER, "single_partition_of_fp32_groups": [], "loss_scaler": value}
    torch.save({"optimizer_state_dict": states}, step / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    return folder


def zero_model():
    return "mp_rank_00_model_states.pt"


def metadata_file(folder, value):
    (folder / ".metadata").write_bytes(pickle.dumps(dcp.Metadata(state_dict_metadata={}, planner_data=value)))
    return folder


def shard_file(folder, value):
    """Write harmless metadata, and a shard that is a program."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    stream = io.BytesIO()
    torch.save(value, stream)
    (folder / "__0_0.distcp").write_bytes(stream.getvalue())
    location = _StorageInfo("__0_0.distcp", 0, len(stream.getvalue()))
    key = "optimizer.param_groups.0.lr"
    metadata = dcp.Metadata(
        state_dict_metadata={key: dcp.BytesStorageMetadata()},
        planner_data={key: ("optimizer", "param_groups", 0, "lr")},
        storage_data={dcp.MetadataIndex(key): location},
    )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


FORMATS = [torch_file, old_torch_file, bare_pickle, accelerate, zero, metadata_file, shard_file]


def refusal_line(path):
    """Return the one line that a checkpoint is refused with."""
    with pytest.raises(DataError) as refusal:
        read_checkpoint(path)
    line = str(refusal.value)
    assert "\n" not in line
    assert line.startswith(str(path))
    assert refusal.value.exit_code == EXIT_USAGE
    return line


@pytest.mark.parametrize("content", [b"import torch\n", b"hello", b"readme", b"\x14\x95 noise", b""])
def test_a_file_that_is_no_checkpoint_is_called_that(tmp_path, content):
    path = tmp_path / "bad.py"
    path.write_bytes(content)
    if content:
        assert refusal_line(path) == f"{path}: not a checkpoint: neither safetensors nor a file of torch.save"
    assert "weights_only" not in refusal_line(path)


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


@pytest.mark.parametrize("write", FORMATS)
def test_a_file_that_ends_early_is_damaged(tmp_path, write):
    path = write(tmp_path, 1e-3)
    files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file() and file.name != "latest"]
    for file in files:
        content = file.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            if file.suffix == ".safetensors" and size == 0:
                continue
            refusal_line(path)
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"only text"),
        ("picture.pt", b"\x89PNG\r\n"),
        ("empty.safetensors", b""),
        ("lies.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"),
        ("zip.pt", b"PK\x05\x06" + bytes(18)),
    ],
)
def test_foreign_files_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    refusal_line(tmp_path / name)


@pytest.mark.parametrize("value", [None, 3, [], {"a": 1}, {"loss": torch.tensor(1.0)}, {"rng": torch.get_rng_state()}])
def test_a_file_without_weights_and_optimizer_says_so(tmp_path, value):
    torch.save(value, tmp_path / "a.pt")
    assert refusal_line(tmp_path / "a.pt").endswith("holds neither the tensors of a model nor the state of an optimizer")


def test_a_folder_without_a_checkpoint_says_what_is_there(tmp_path):
    assert "the folder is empty" in refusal_line(tmp_path)
    (tmp_path / "step-00000100").mkdir()
    assert "folders: step-00000100" in refusal_line(tmp_path)
    assert "no such file or directory" in refusal_line(tmp_path / "nowhere")


def test_a_pipe_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert refusal_line(tmp_path / "pipe").endswith("neither a file nor a folder")


def test_a_missing_rank_of_zero_is_named(tmp_path):
    zero(tmp_path, None)
    model = tmp_path / "global_step1" / zero_model()
    torch.save(torch.load(model) | {"dp_world_size": 3}, model)
    with pytest.raises(DataError, match="the optimizer states of rank 1, 2 of 3 are missing"):
        read_checkpoint(tmp_path)
    model.unlink()
    with pytest.raises(DataError, match=r"holds no \*_model_states.pt"):
        read_checkpoint(tmp_path)


def test_a_missing_part_of_a_model_is_named(tmp_path):
    save_file(WEIGHTS, tmp_path / "model-00001-of-00002.safetensors")
    index = '{"weight_map": {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "names model-00002-of-00002.safetensors, which is not there" in refusal_line(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    shard_file(tmp_path, 1e-3)
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(DataError, match=r"__0_0.distcp: is missing"):
        read_checkpoint(tmp_path)


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
