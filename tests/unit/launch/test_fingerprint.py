"""Fingerprints of benchbox, of policies and of data: which edits change them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchbox.errors import ConfigurationError
from benchbox.launch import fingerprint
from benchbox.launch.fingerprint import benchbox_sha256, data_sha256, policy_sha256, report_sha256
from benchbox.registry.policies import find_policies
from benchbox.spec.cell import DataSpec
from benchbox.spec.datasets import DatasetSpec
from tests.support.datasets import write_dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

POLICIES = Path(__file__).parents[3] / "policies"
NAMES = sorted(find_policies())
FLOW = {"pi0", "pi05", "pi05_mem", "pi06", "pi07_low_level", "pi07_paligemma"}


def fingerprints(folder: Path) -> dict[str, str]:
    return {name: policy_sha256(name, [folder]) for name in NAMES}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Copy the policies of this repository, and return their folder and their fingerprints."""
    folder = tmp_path_factory.mktemp("copied") / "policies"
    shutil.copytree(POLICIES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder, fingerprints(folder)


@pytest.mark.parametrize(
    ("file", "policies"),
    [
        ("vitra/dit.py", {"vitra"}),
        ("vitra/presets.yaml", {"vitra"}),
        ("cosmos_droid/latents.py", {"cosmos_droid"}),
        ("_layers/families/context_policy.py", {"pi07_low_level", "pi07_paligemma"}),
        ("_layers/families/memory_policy.py", {"pi05_mem", "pi07_low_level", "pi07_paligemma"}),
        ("_layers/families/flow_policy.py", FLOW),
        ("_layers/nn/discrete.py", FLOW),  # which flow_policy imports
        ("_layers/families/flow.py", FLOW | {"cosmos_droid"}),
        ("_layers/nn/rope.py", set(NAMES)),
        ("_layers/__init__.py", set(NAMES)),
    ],
)
def test_an_edit_changes_exactly_the_policies_that_import_the_file(
    copied: tuple[Path, dict[str, str]], file: str, policies: set[str]
) -> None:
    folder, before = copied
    content = (folder / file).read_text()
    (folder / file).write_text(content + "# edited\n")
    try:
        assert {name for name, fingerprint in fingerprints(folder).items() if fingerprint != before[name]} == policies
    finally:
        (folder / file).write_text(content)


def test_the_fingerprint_does_not_depend_on_the_location_of_the_folders(
    copied: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    folder, before = copied
    assert len(set(before.values())) == len(NAMES)
    assert fingerprints(Path(shutil.copytree(folder, tmp_path / "elsewhere"))) == before


@pytest.mark.parametrize(
    ("statement", "counts"),
    [
        ("from .._shared import block", True),
        ("from .._shared.block import Block", True),
        ("import benchbox_policies._shared.block", True),
        ("from benchbox_policies._shared import block as name", True),
        ("from .._shared import chain", True),
        ("def build():\n    from .._shared import block", True),
        ("try:\n    pass\nexcept ImportError:\n    from .._shared import block", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    from .._shared import block", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .._shared import block", False),
        ("import typing\nif typing.TYPE_CHECKING:\n    from .._shared import block", False),
        ("import sys\nif sys.argv:\n    from .._shared import block", True),
        ("from .._shared import unrelated", False),
        ("from _shared import block", False),
        ("from .... import block", False),
    ],
)
def test_an_import_counts_where_it_runs(policy_dir: Path, statement: str, counts: bool) -> None:
    """The edited file is `_shared/block.py`, which `_shared/chain.py` imports."""
    shared = policy_dir / "_shared"
    shared.mkdir()
    (shared / "__init__.py").touch()
    (shared / "unrelated.py").touch()
    (shared / "chain.py").write_text("from .block import Block\n")
    (shared / "block.py").write_text("Block = 1\n")
    (policy_dir / "stand_in" / "policy.py").write_text(statement + "\n")
    before = policy_sha256("stand_in", [policy_dir])
    (shared / "block.py").write_text("Block = 2\n")
    assert (policy_sha256("stand_in", [policy_dir]) != before) == counts


def test_a_package_on_the_way_counts_with_its_imports(policy_dir: Path) -> None:
    (policy_dir / "_shared" / "room").mkdir(parents=True)
    (policy_dir / "_shared" / "__init__.py").write_text("from .registry import names\n")
    (policy_dir / "_shared" / "registry.py").write_text("names = ()\n")
    (policy_dir / "_shared" / "room" / "block.py").touch()  # room is a namespace package
    (policy_dir / "stand_in" / "policy.py").write_text("from .._shared.room.block import Block\n")
    before = policy_sha256("stand_in", [policy_dir])
    (policy_dir / "_shared" / "registry.py").write_text("names = ('block',)\n")
    changed = policy_sha256("stand_in", [policy_dir])
    assert changed != before
    (policy_dir / "_shared" / "room" / "block.py").write_text("Block = 1\n")
    assert policy_sha256("stand_in", [policy_dir]) != changed


def test_of_two_folders_the_shared_module_of_the_first_counts(policy_dir: Path, tmp_path: Path) -> None:
    """The second folder's module of the same name is never imported."""
    for folder in (policy_dir, tmp_path / "second"):
        (folder / "_shared").mkdir(parents=True)
        for file in ("__init__.py", "block.py"):
            (folder / "_shared" / file).touch()
    (policy_dir / "stand_in" / "policy.py").write_text("from .._shared import block\n")
    dirs = [policy_dir, tmp_path / "second"]
    before = policy_sha256("stand_in", dirs)
    (tmp_path / "second" / "_shared" / "block.py").write_text("Block = 1\n")
    assert policy_sha256("stand_in", dirs) == before
    (policy_dir / "_shared" / "block.py").write_text("Block = 1\n")
    assert policy_sha256("stand_in", dirs) != before


def _swap_content(folder: Path) -> None:
    (folder / "stand_in" / "policy.py").rename(folder / "stand_in" / "policies.py")
    (folder / "stand_in" / "policy.py").write_text("")


@pytest.mark.parametrize(
    "edit",
    [
        lambda folder: (folder / "stand_in" / "presets.yaml").write_text("tiny: {width: 2}\n"),
        lambda folder: (folder / "stand_in" / "table.json").write_text("{}"),
        _swap_content,
    ],
)
def test_every_file_of_the_policy_s_own_folder_counts(edit: Callable[[Path], None], policy_dir: Path) -> None:
    before = policy_sha256("stand_in", [policy_dir])
    edit(policy_dir)
    assert policy_sha256("stand_in", [policy_dir]) != before


def test_other_policies_and_compiled_or_hidden_files_do_not_count(policy_dir: Path) -> None:
    before = policy_sha256("stand_in", [policy_dir])
    for name in ("other/policy.py", "stand_in/__pycache__/policy.cpython-311.pyc", "stand_in/.policy.py.swp"):
        (policy_dir / name).parent.mkdir(exist_ok=True)
        (policy_dir / name).write_text("x = 1\n")
    assert policy_sha256("stand_in", [policy_dir]) == before


def test_a_policy_that_cannot_be_parsed_still_has_a_fingerprint(policy_dir: Path) -> None:
    """Its launch then reports the error."""
    (policy_dir / "stand_in" / "policy.py").write_text("def build(:\n")
    assert len(policy_sha256("stand_in", [policy_dir])) == 64


def test_an_unknown_policy_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="unknown policy 'stand_in'"):
        policy_sha256("stand_in")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package, which `benchbox_sha256` reads at every call."""
    folder = tmp_path / "benchbox"
    shutil.copytree(fingerprint._BENCHBOX, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprint, "_BENCHBOX", folder)
    monkeypatch.setattr(fingerprint, "benchbox_sha256", benchbox_sha256.__wrapped__)
    return folder


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("session/step.py", True),
        ("worker/measuring.py", True),
        ("optim/native.c", True),
        ("data/sample_dataset/meta/stats.json", True),
        ("report/html.py", False),
        ("cli/run.py", False),
        ("analysis/summary.py", False),
        ("_bundled/matrices/new.yaml", False),
        ("session/__pycache__/step.pyc", False),
    ],
)
def test_an_edit_of_benchbox_counts_where_a_launch_may_use_the_file(package: Path, file: str, counts: bool) -> None:
    before = fingerprint.benchbox_sha256()
    (package / file).parent.mkdir(parents=True, exist_ok=True)
    with (package / file).open("a") as stream:
        stream.write("\n# edited\n")
    assert (fingerprint.benchbox_sha256() != before) == counts


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("analysis/comparability.py", True),
        ("report/templates/style.css", True),
        ("registry/metrics.py", True),
        ("session/step.py", False),
        ("cli/run.py", False),
    ],
)
def test_an_edit_of_benchbox_makes_another_report_where_it_decides_what_a_report_says(
    package: Path, file: str, counts: bool
) -> None:
    before = report_sha256.__wrapped__()
    with (package / file).open("a") as stream:
        stream.write("\n")
    assert (report_sha256.__wrapped__() != before) == counts


def test_what_a_launch_uses_imports_nothing_that_the_fingerprint_leaves_out() -> None:
    root = fingerprint._BENCHBOX
    left_out = {("benchbox", folder) for folder in fingerprint._NOT_IN_A_LAUNCH}
    for path in root.rglob("*.py"):
        if path.relative_to(root).parts[0] in fingerprint._NOT_IN_A_LAUNCH:
            continue
        for _, module, names in fingerprint._read_imports(path.read_bytes()):
            imported = {(*module, name)[:2] for name in names} | {module[:2]}
            assert not imported & left_out, path


def test_data_count_by_their_metadata_wherever_they_lie(tmp_path: Path) -> None:
    first, copy = (DataSpec(kind="lerobot", path=str(tmp_path / name)) for name in ("first", "copy"))
    write_dataset(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    before = data_sha256(first)
    assert before == data_sha256(copy)
    (tmp_path / "copy/meta/benchbox_statistics.json").write_text("{}")  # a cache of benchbox
    assert before == data_sha256(copy)
    with (tmp_path / "copy/meta/info.json").open("a") as file:
        file.write(" ")
    assert before != data_sha256(copy)


def test_the_order_of_a_mixture_its_kept_frames_and_the_tokenizer_count(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "meta").mkdir(parents=True)
        (tmp_path / name / "meta/info.json").write_text(name)
    file = tmp_path / "benchbox_file"  # a name that counts for nothing in the metadata of a dataset
    file.write_text("{}")
    a, b = (DatasetSpec(path=str(tmp_path / name)) for name in ("a", "b"))
    data = [
        DataSpec(kind="lerobot", datasets=(a, b)),
        DataSpec(kind="lerobot", datasets=(b, a)),
        DataSpec(kind="lerobot", datasets=(a, replace(b, keep=str(file)))),
        DataSpec(kind="lerobot", datasets=(a, b), tokenizer=str(file)),
    ]
    digests = [data_sha256(spec) for spec in data]
    assert len(set(digests)) == 4
    file.write_text("[]")
    assert [data_sha256(spec) == before for spec, before in zip(data, digests, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize("kind", ["sample", "synthetic"])
def test_data_without_files_of_their_own_have_no_fingerprint(kind: str) -> None:
    """The shipped dataset is a part of benchbox."""
    assert data_sha256(DataSpec(kind=kind)) is None
