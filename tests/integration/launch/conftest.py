import pytest

from benchbox.launch.process.local import LocalLauncher
from tests.support.launchers import HERE


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> LocalLauncher:
    """The real launcher, with the stand-in for a worker."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    return LocalLauncher(worker_module="tests.support.stand_in_worker", grace_s=1.0)
