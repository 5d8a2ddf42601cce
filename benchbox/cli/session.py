"""A session of benchbox as a subject of `benchbox audit-precision`: from command-line options to the facts of every rank."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchbox.cli.subjects import Subject, check_recipe, observer_failure
from benchbox.errors import CellFailedError, ConfigurationError, Problem, UnsupportedError

if TYPE_CHECKING:
    from benchbox.spec.cell import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRequest:
    """Cell given by command-line options; `steps` are those before the observed steps."""

    policy: str
    backend: str
    recipe: str
    size: str
    world_size: int | None
    beta2: float | None
    data: str
    steps: int
    policy_dirs: Sequence[Path]
    launcher: str


def session_subject(request: SessionRequest) -> Subject:
    """Run a few steps on real ranks. The files of the ranks are kept only if they fail.

    Raises:
        CellFailedError: the steps failed.
        ConfigurationError: there is no such policy, size, backend or recipe.
        UnsupportedError: this combination of them is not supported.
    """
    from benchbox.audit.record import read_facts
    from benchbox.launch.launch import launch_cell
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.launch.supervise.outcome import failure_text
    from benchbox.spec.cell import MeasureSpec

    cell = _cell(request)
    folder = Path(tempfile.mkdtemp(prefix="benchbox-audit-"))
    launch_folder = folder / "launch"
    measure = MeasureSpec(warmup_steps=0, steps=request.steps, launches=1)
    with stop_on_signals() as stop:
        record = launch_cell(
            cell,
            measure,
            launch=1,
            folder=launch_folder,
            launcher=make_launcher(request.launcher),
            policy_dirs=request.policy_dirs,
            stop=stop,
        )
    if record["status"] == "interrupted":
        shutil.rmtree(folder)
        raise KeyboardInterrupt
    if record["status"] != "ok":
        raise CellFailedError(f"{failure_text(record['status'], record['error'])}; logs: {folder}")
    facts = read_facts(launch_folder, cell.world_size)
    shutil.rmtree(folder)
    observed = record["observed"]
    assert observed is not None, "an ok record has observations"
    return Subject(
        name=f"{observed['backend']} with {cell.recipe}",
        title=f"{cell.policy} {cell.size}, {observed['backend']}, {cell.recipe}, beta2 {cell.optim.betas[1]}",
        metadata={"kind": "session", "cell": cell.to_dict(), "observed": observed},
        facts=facts,
        failure=observer_failure(facts),
    )


def _cell(request: SessionRequest) -> "Cell":
    from benchbox.cli.capacity import check_capacity
    from benchbox.registry.attention import default_attention
    from benchbox.registry.backends import backend_info
    from benchbox.registry.names import did_you_mean
    from benchbox.registry.policies import policy_entry
    from benchbox.registry.refusals import cell_refusal
    from benchbox.spec.cell import Cell, DataSpec, OptimSpec

    entry, info = policy_entry(request.policy, request.policy_dirs), backend_info(request.backend)
    if request.size not in entry.presets:
        hint = did_you_mean(request.size, entry.presets)
        raise ConfigurationError(Problem("--size", f"policy {request.policy} has no size {request.size!r}", hint))
    check_recipe(request.recipe)
    ranks = info.min_ranks if request.world_size is None else request.world_size
    if ranks_refusal := info.ranks_refusal(ranks):
        raise ConfigurationError(Problem("--world-size", ranks_refusal))
    check_capacity("--world-size", ranks)
    attention: Any = default_attention(entry)
    optim = OptimSpec()
    if request.beta2 is not None:
        if request.beta2 >= 1.0:
            problem = Problem("--beta2", f"{request.beta2} would never forget a gradient", "give a value below 1")
            raise ConfigurationError(problem)
        optim = OptimSpec(betas=(optim.betas[0], request.beta2))
    cell = Cell(
        policy=request.policy,
        size=request.size,
        backend=request.backend,
        recipe=request.recipe,
        world_size=ranks,
        batch=1,
        attention=attention,
        data=DataSpec(kind=request.data, workers=0),
        optim=optim,
    )
    if refusal := cell_refusal(cell):
        raise UnsupportedError(refusal)
    return cell
