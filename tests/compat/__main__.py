"""Test benchbox at the lowest and the highest versions of its dependencies: `make compat`.

Prints the versions and the results of both environments, and the versions that an installation beside lerobot chooses. A
repeated call continues. Exit code 1 when a part failed or could not run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

from tests.compat.changes import changed_since_tested, write_tested
from tests.compat.environments import ENVIRONMENTS, ROOT, build, installed_versions, lock
from tests.compat.parts import PARTS, Result
from tests.compat.resolution import NEIGHBOURS, NetworkError, NoSolutionError, resolve

if TYPE_CHECKING:
    from tests.compat.environments import Environment

_SHOWN = ("torch", "transformers", "accelerate", "deepspeed", "av", "numpy", "pandas", "pyarrow")
_SOURCES = ("benchbox", "policies", "matrices", "tests", "pyproject.toml", ":!tests/compat/tested.json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make compat", description=__doc__.splitlines()[0])
    names = [environment.name for environment in ENVIRONMENTS]
    parser.add_argument("--only", choices=names, help="one environment, without the resolution beside lerobot")
    parser.add_argument("--if-changed", action="store_true", help="the lowest versions, if dependencies have changed; for CI")
    parser.add_argument("--lock", action="store_true", help="write the requirements of both environments anew, and run nothing")
    options = parser.parse_args()
    if options.lock:
        for environment in ENVIRONMENTS:
            lock(environment)
        return 0
    if options.if_changed and not changed_since_tested():
        print("make compat: dependencies are those of tests/compat/tested.json, which passed with the lowest versions")
        return 0
    only = ENVIRONMENTS[0].name if options.if_changed else options.only
    failed = []
    for environment in ENVIRONMENTS:
        if only in (None, environment.name):
            failed += _test_environment(environment, write=not options.if_changed)
    if only is None:
        failed += _print_neighbours()
    for name in failed:
        print(f"make compat: failed: {name}")
    return int(bool(failed))


def _test_environment(environment: Environment, *, write: bool) -> list[str]:
    """Run all parts, print their results, and return the names of those that failed."""
    print(f"{environment.name}: building the environment", flush=True)
    try:
        build(environment)
    except RuntimeError as error:
        print(f"{environment.name}: {error}")
        return [f"{environment.name}, environment"]
    versions = installed_versions(environment, _direct_dependencies())
    print(f"{environment.name}: " + ", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    results = {}
    for part in PARTS:
        results[part] = _result(environment, part)
        print(f"{environment.name}: {part}: {results[part].summary}")
        for line in results[part].skips:
            print(f"  skipped {line}")
        for line in results[part].failures:
            print(f"  FAILED {line}")
        sys.stdout.flush()
    failed = [f"{environment.name}, {part}" for part, result in results.items() if not result.passed]
    if write and not failed and environment is ENVIRONMENTS[0]:
        write_tested(versions, results)
    return failed


def _result(environment: Environment, part: str) -> Result:
    """Return the result of a part; one that passed with the same sources and environment is not run again."""
    path = environment.folder / f"{part.replace(' ', '-')}.json"
    inputs = _sources_digest() + (environment.folder / "built").read_text()
    if path.exists() and (stored := json.loads(path.read_text()))["inputs"] == inputs:
        return Result.from_dict(stored["result"])
    result = PARTS[part](environment)
    if result.passed:
        path.write_text(json.dumps({"inputs": inputs, "result": result.to_dict()}, indent=1))
    return result


def _sources_digest() -> str:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_SOURCES]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    digest = hashlib.sha256()
    for name in sorted(filter(None, names)):
        path = ROOT / name
        digest.update(name.encode() + b"\0" + (path.read_bytes() if path.exists() else b""))
    return digest.hexdigest()


def _direct_dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["lowbit"]]
    return [re.split(r"[^A-Za-z0-9._-]", requirement)[0] for requirement in requirements]


def _print_neighbours() -> list[str]:
    """Print the versions chosen beside other packages, and return those that benchbox cannot be installed beside."""
    failed = []
    for neighbour in NEIGHBOURS:
        name = f"benchbox and {neighbour.requirement}, Python {neighbour.python_version}"
        try:
            versions = resolve([neighbour.requirement], neighbour.python_version)
        except NetworkError as error:
            print(f"{name}: skipped, the package index does not answer: {str(error).splitlines()[-1]}")
        except NoSolutionError as error:
            print(f"{name}: FAILED\n{error}")
            failed.append(name)
        else:
            print(f"{name}: " + ", ".join(f"{package} {versions[package]}" for package in ("lerobot", *_SHOWN)), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
