from pathlib import Path

import pytest
from launching import HERE

from benchbox.launch.local import LocalLauncher


@pytest.fixture
def policy_dir(tmp_path: Path) -> Path:
    """A folder of policies with one in it, of which only the sources matter here."""
    folder = tmp_path / "policies" / "stand_in"
    folder.mkdir(parents=True)
    (folder / "policy.py").write_text("def build(preset, axes): ...\n")
    (folder / "presets.yaml").write_text("tiny: {}\n")
    return folder.parent


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    """The real launcher, with the stand-in for a worker."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    return LocalLauncher(worker_module="stand_in_worker", grace_s=1.0)
