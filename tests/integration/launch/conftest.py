import pytest

from benchbox.launch.process.cold import TorchrunLauncher
from benchbox.launch.process.warm import ForkServerLauncher
from tests.support.launchers import HERE

STAND_IN = "tests.support.stand_in_worker"


@pytest.fixture(params=["torchrun", "fork_server"])
def launcher(request, monkeypatch: pytest.MonkeyPatch):
    """Both real launchers, with the stand-in for a worker, which imports no torch."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    if request.param == "torchrun":
        yield TorchrunLauncher(worker_module=STAND_IN, grace_s=1.0)
    else:
        launcher = ForkServerLauncher(worker_module=STAND_IN, preload=["benchbox.store.files"], grace_s=1.0)
        yield launcher
        launcher.close()
