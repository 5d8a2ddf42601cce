from pathlib import Path

import pytest
from launching import HERE, MEASURE, MakeJob, cell

from benchbox.launch.job import Job
from benchbox.launch.local import LocalLauncher
from benchbox.spec.cell import MeasureSpec


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    """A folder of policies with one in it, of which only the sources matter here."""
    folder = tmp_path / "policies" / "stand_in"
    folder.mkdir(parents=True)
    (folder / "policy.py").write_text("def build(preset, axes): ...\n")
    (folder / "presets.yaml").write_text("tiny: {}\n")
    return folder.parent


@pytest.fixture
def make_job(tmp_path: Path, policy_dir: Path) -> MakeJob:
    def make(behaviour: str, world_size: int = 2, measure: MeasureSpec = MEASURE) -> Job:
        return Job(
            cell=cell(behaviour, world_size),
            measure=measure,
            launch=1,
            policy_dirs=(policy_dir,),
            folder=tmp_path / "run" / "launch-1",
        )

    return make


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    """The real launcher, with the stand-in for a worker."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return LocalLauncher(worker_module="stand_in_worker", grace_s=1.0)
