"""Plugin of pytest: the fixture `benchbox` measures the cell that the marker `benchbox` describes.

    @pytest.mark.benchbox(policy="policies/mine", backend="ddp", recipe="bf16_master", batch=4)
    def test_my_policy_trains_in_float32_masters(benchbox):
        assert benchbox.samples_per_s > 100
        assert benchbox.peak_allocated_bytes < 2 * 2**30
        assert benchbox.failing == []

It is installed with benchbox; `-p no:benchbox` switches it off.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.api.measurement import Measurement
    from benchbox.api.results import Results

_SEVERAL_CELLS = {"axes", "include", "exclude"}
_EXAMPLE = '@pytest.mark.benchbox(policy="pi05", backend="ddp")'


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "benchbox(**fields): the cell that the fixture benchbox measures, as fields of a matrix")


@pytest.fixture
def benchbox(request: pytest.FixtureRequest, tmp_path: Path) -> Measurement:
    """Return the measurement of the cell that the marker of the test describes. A launch that does not end ok fails the test.

    There is one launch unless the marker says `measure={"launches": 5}`.
    """
    from benchbox.api.commands import json_of, run
    from benchbox.api.measurement import Measurement
    from benchbox.errors import ConfigurationError

    marker = request.node.get_closest_marker("benchbox")
    if marker is None or marker.args or not marker.kwargs:
        pytest.fail(f"the fixture benchbox needs a marker with the fields of a cell: {_EXAMPLE}", pytrace=False)
    if several := _SEVERAL_CELLS & marker.kwargs.keys():
        pytest.fail(f"the marker benchbox describes one cell, and {', '.join(sorted(several))} is for several", pytrace=False)
    matrix = tmp_path / "matrix.yaml"
    values = _matrix(marker.kwargs, request.config.rootpath)
    try:
        matrix.write_text(json_of("fields", values), encoding="utf-8")
        results = run(matrix, out=tmp_path / "run")
    except ConfigurationError as error:  # positions in the written matrix say nothing
        problems = re.sub(rf"{re.escape(str(matrix))}[\d:]* ", "", str(error))
        raise pytest.fail.Exception(f"the marker benchbox: {problems}", pytrace=False) from None
    (status,) = results.cells["status"]
    if status != "ok":
        pytest.fail(_why_not_ok(results), pytrace=False)
    return Measurement(results)


def _why_not_ok(results: Results) -> str:
    """Return why the only cell of a run has no figures: a launch failed, or its launches trained differently."""
    from benchbox.analysis.summary import summarize

    (summary,) = summarize(results.run, results.records)
    if summary.error is None:
        return f"the cell is {summary.status}: {summary.divergence or 'launches are missing'}"
    return f"the launch ended as {summary.status}: {summary.error['type']}: {summary.error['message']}"


def _below(root: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data section of which the datasets that are folders below `root` are named from there."""
    below = dict(data)
    path, mixture = data.get("lerobot"), data.get("mixture")
    if isinstance(path, str | Path) and (root / path).is_dir():
        below["lerobot"] = str(root / path)
    if isinstance(mixture, list):
        below["mixture"] = [_below(root, entry) if isinstance(entry, dict) else entry for entry in mixture]
    return below


def _matrix(fields: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """Return a matrix of one cell. Folders that it names are relative to the root of the tests."""
    from benchbox.registry.policies import find_policies

    backend = fields.get("backend", "single")
    values = {key: value for key, value in fields.items() if key != "backend"}
    policy, data = values.get("policy"), values.get("data")
    if isinstance(policy, str | Path) and str(policy) not in find_policies() and (root / policy).is_dir():
        values["policy"] = str(root / policy)
    if isinstance(data, str | Path) and data not in ("sample", "synthetic") and (root / data).is_dir():
        data = {"lerobot": data}
    if isinstance(data, dict):
        values["data"] = _below(root, data)
    measure = values.pop("measure", {})
    if isinstance(measure, dict):  # else the matrix has an error that says so
        measure = {"launches": 1, **measure}
    return {"name": "test", "size": "tiny", "world_size": 1 if backend == "single" else 2, **values} | {
        "axes": {"backend": [backend]},
        "measure": measure,
    }
