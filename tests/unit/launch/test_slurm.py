"""The resources and the script of a Slurm job; nothing a user writes is executed by a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from benchbox.cli.app import app
from benchbox.errors import ConfigurationError
from benchbox.launch.slurm import job as slurm_job
from benchbox.launch.slurm.job import SlurmError, SlurmJob
from benchbox.launch.slurm.options import parse_slurm_options
from benchbox.launch.slurm.script import render_script
from benchbox.store.files import write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

HOSTILE = "a'; touch pwned; $(touch pwned)\n#SBATCH --uid=0 %j `touch pwned`"


def test_resources_are_lines_of_the_script() -> None:
    options = parse_slurm_options(["nodes=2,gpus_per_node=8", "partition=h100,time=1-12:00,nodelist=[a[1-2],b]"])
    script = render_script(options, name="m", command=["benchbox", "run"], folder=Path("/work"), logs=Path("/out/slurm"))
    assert [line for line in script.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=benchbox-m",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --output=/dev/null",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=h100",
        "#SBATCH --time=1-12:00",
        "#SBATCH --nodelist=a[1-2],b",
    ]
    assert 'export NNODES="$SLURM_JOB_NUM_NODES"' in script
    assert 'NODE_RANK="$SLURM_NODEID" exec "$@"' in script
    assert "srun --kill-on-bad-exit=0 " in script, "node 0 outlives the others, and records how they failed"


def test_typed_gpus_a_whole_node_and_a_signal_are_lines_of_the_script(tmp_path: Path) -> None:
    options = parse_slurm_options(["gpus_per_node=h100:8,exclusive", "signal=USR1@120"])
    script = render_script(options, name="m", command=["benchbox"], folder=tmp_path, logs=tmp_path)
    lines = script.splitlines()
    assert {"#SBATCH --gpus-per-node=h100:8", "#SBATCH --exclusive", "#SBATCH --signal=USR1@120"} <= set(lines)
    assert parse_slurm_options(["exclusive=user,signal=B:USR1"]).values == {"exclusive": "user", "signal": "B:USR1"}


@pytest.mark.parametrize(("cpus", "words"), [("32", ["--cpus-per-task=32"]), (None, [])])
def test_a_task_asks_for_the_cpus_of_the_job(cpus: str | None, words: list[str], tmp_path: Path) -> None:
    """srun takes them over from sbatch in no version since 22.05, and a task that is bound to one CPU has one thread."""
    script = render_script(parse_slurm_options([]), name="m", command=["benchbox"], folder=tmp_path, logs=tmp_path)
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"} | ({"SLURM_CPUS_PER_TASK": cpus} if cpus else {})
    subprocess.run(["bash", "-c", script], env=variables, cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    arguments = (tmp_path / "job-7.log").read_text().splitlines()
    assert [word for word in arguments if word.startswith("--cpus") or not word] == words


@pytest.mark.parametrize(("restarts", "words"), [(None, ["train", "f"]), ("1", ["train", "f", "--resume"])])
def test_a_training_that_slurm_has_requeued_resumes(restarts: str | None, words: list[str], tmp_path: Path) -> None:
    """The script runs again from its first line. A node that fails is enough: Slurm requeues jobs by default."""
    script = render_script(
        parse_slurm_options([]), name="t", command=["train", "f"], folder=tmp_path, logs=tmp_path, requeued="--resume"
    )
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\n" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    subprocess.run(["bash", "-c", script], env=variables, cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    arguments = (tmp_path / "job-7.log").read_text().splitlines()
    assert arguments[arguments.index("benchbox") + 1 :] == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodes", "is not key=value"),
        ("nodes=0", "'0' is not a number from 1"),
        ("partion=a", "did you mean 'partition'"),
        ("partition=a b", "'a b' is not a name"),
        ("partition=a\n#SBATCH --uid=0", "is not a name"),
        ("account=$(id)", "is not a name"),
        ("time=soon", "'soon' is not a time"),
        ("gpus_per_node=h100", "'h100' is not a number from 1, after a type or not"),
        ("gpus_per_node=h100:8 --uid=0", "is not a number from 1"),
        ("signal=120", "'120' is not a signal"),
        ("signal=USR1@$(id)", "is not a signal"),
        ("exclusive=all", "'all' is not nothing, user, mcs or topo"),
        ("uid=0", "there is no option 'uid'"),
    ],
)
def test_a_wrong_resource_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_slurm_options([text])
    assert words in str(refusal.value)
    assert f"--slurm {text}" in str(refusal.value)


def test_a_shell_executes_nothing_of_hostile_names(tmp_path: Path) -> None:
    """The script runs here with stand-ins for Slurm's commands that print the words they get."""
    folder = tmp_path / HOSTILE.replace("/", "_")
    logs = folder / "slurm"
    logs.mkdir(parents=True)
    command = ["printf", "%s\\0", HOSTILE]
    script = render_script(parse_slurm_options([]), name=HOSTILE, command=command, folder=folder, logs=logs)
    comments = list(takewhile(lambda line: line.startswith("#"), script.splitlines()))  # sbatch reads no further
    assert [line.split("=")[0] for line in comments if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name",
        "#SBATCH --nodes",
        "#SBATCH --ntasks-per-node",
        "#SBATCH --output",
    ]
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/bash\nshift\nSLURM_NODEID=0 exec "$@"\n')
    (tools / "scontrol").write_text("#!/bin/bash\necho host1\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    variables = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "host1",
    }
    subprocess.run(["bash", "-c", script], env=variables, cwd=tmp_path, check=True)
    assert (logs / "job-7.log").read_text() == HOSTILE + "\0"
    assert list(tmp_path.rglob("pwned")) == []


def dry_run(matrix: Path, policy_dir: Path, *options: str) -> str:
    return run_dry(matrix, policy_dir, *options).stdout


def run_dry(matrix: Path, policy_dir: Path, *options: str) -> Result:
    words = ["run", str(matrix), "--policy-dir", str(policy_dir), "--out", str(matrix.parent / "o ut"), *options]
    result = CliRunner().invoke(app, [*words, "--dry-run"])
    if result.exception is not None:
        raise result.exception
    return result


def job_words(text: str) -> list[str]:
    """Return the words of the command in the script that a dry run prints."""
    (line,) = [line for line in text[text.index("#!/bin/bash") :].splitlines() if "benchbox.cli.app" in line]
    return shlex.split(line)


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    (tmp_path / "m.yaml").write_text(
        "name: m\npolicy: stand_in\nsize: tiny\nbackend: ddp\nworld_size: 400\nbatch: 2\ndata: synthetic\n"
    )
    return tmp_path / "m.yaml"


def test_a_dry_run_prints_the_script_and_submits_nothing(matrix: Path, policy_dir: Path) -> None:
    """The ranks are more than this machine could run: the job runs on others."""
    slurm = ("--launcher", "slurm", "--slurm", "nodes=50", "--node-timeout", "45")
    text = dry_run(matrix, policy_dir, *slurm, "--set", "batch=4", "--only", "batch=4")
    words = job_words(text)
    assert words[1:5] == ["-m", "benchbox.cli.app", "run", str(matrix)]
    assert words[words.index("--out") + 1] == str(matrix.parent / "o ut")
    assert words[words.index("--set") + 1] == words[words.index("--only") + 1] == "batch=4"
    assert words[words.index("--policy-dir") + 1] == str(policy_dir.resolve())
    assert words[-4:] == ["--launcher", "torchrun", "--node-timeout", "45"]
    assert "#SBATCH --nodes=50" in text
    assert SlurmJob(matrix.parent / "o ut").id is None


@pytest.mark.parametrize("options", [(), ("--fresh",), ("--no-estimate",), ("--fresh", "--no-estimate")])
def test_a_job_repeats_launches_and_leaves_predictions_out_when_its_command_does(
    options: tuple[str, ...], matrix: Path, policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BENCHBOX_ESTIMATE", raising=False)
    words = job_words(dry_run(matrix, policy_dir, "--launcher", "slurm", *options))
    assert [word for word in words if word in ("--fresh", "--no-estimate")] == list(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--slurm", "nodes=2"], "--slurm nodes=2: has no effect; add --launcher slurm"),
        (["--launcher", "slurm", "--slurm", "nodes=3"], "400 ranks cannot be divided equally among 3 nodes"),
        (
            ["--launcher", "slurm", "--slurm", "nodes=50,gpus_per_node=h100:7"],
            "--slurm gpus_per_node=7: world_size puts 8 ranks on a node, and each needs a GPU of its own; lower world_size",
        ),
        (["--launcher", "slurm", "--nnodes", "2", "--node-rank", "0", "--master-addr", "a"], "use --slurm nodes=2"),
    ],
)
def test_options_that_contradict_are_refused(options: list[str], words: str, matrix: Path, policy_dir: Path) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        dry_run(matrix, policy_dir, *options)
    assert words in str(refusal.value)


def test_a_training_of_more_ranks_than_gpus_is_refused(tmp_path: Path, policy_dir: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "name: t\npolicy: stand_in\nsize: tiny\nbackend: ddp\nworld_size: 4\nbatch: 2\ndata: synthetic\nsteps: 1\n"
    )
    words = ["train", str(tmp_path / "t.yaml"), "--policy-dir", str(policy_dir), "--launcher", "slurm", "--dry-run"]
    result = CliRunner().invoke(app, [*words, "--slurm", "gpus_per_node=3"])
    assert "gpus_per_node=3: world_size puts 4 ranks on a node" in str(result.exception)


@pytest.mark.parametrize(("gpus", "warning"), [(8, ""), (9, "world_size puts 8 ranks on a node, the other GPUs are idle\n")])
def test_gpus_without_a_rank_are_a_warning(gpus: int, warning: str, matrix: Path, policy_dir: Path) -> None:
    result = run_dry(matrix, policy_dir, "--launcher", "slurm", "--slurm", f"nodes=50,gpus_per_node={gpus}")
    assert result.stderr.endswith(warning) if warning else result.stderr == ""


def test_a_machine_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="there is no command sbatch on this machine"):
        SlurmJob(tmp_path).submit("#!/bin/bash\n")


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SlurmJob]:
    """Return a job whose `squeue` is the given line of shell: real jobs do not end in every way."""

    def job_of(line: str) -> SlurmJob:
        squeue = tmp_path / "squeue"
        squeue.write_text(f"#!/bin/bash\n{line}\n")
        squeue.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        write_json(tmp_path / "slurm" / "job.json", {"id": 7})
        return SlurmJob(tmp_path)

    return job_of


@pytest.mark.parametrize(
    ("line", "text", "active", "ended_by_itself"),
    [
        ("echo 'PENDING|Resources'", "PENDING (Resources)", True, False),
        ("echo 'RUNNING|None'", "RUNNING", True, False),
        ("echo 'COMPLETING|None'", "COMPLETING", True, False),
        *(
            (f"echo '{state}|None'", state, True, False)
            for state in (
                "CONFIGURING",
                "SUSPENDED",
                "REQUEUED",
                "REQUEUE_HOLD",
                "RESIZING",
                "SIGNALING",
                "STOPPED",
                "STAGE_OUT",
            )
        ),
        ("echo 'COMPLETED|None'", "COMPLETED", False, True),
        ("echo 'FAILED|NonZeroExitCode'", "FAILED (NonZeroExitCode)", False, True),
        ("echo 'TIMEOUT|TimeLimit'", "TIMEOUT (TimeLimit)", False, False),
        ("echo 'NODE_FAIL|None'", "NODE_FAIL", False, False),
        ("echo 'CANCELLED|None'", "CANCELLED", False, False),
        ("echo 'OUT_OF_MEMORY|OutOfMemory'", "OUT_OF_MEMORY (OutOfMemory)", False, False),
        ("echo 'PREEMPTED|None'", "PREEMPTED", False, False),
        ("true", "FORGOTTEN", False, False),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "FORGOTTEN", False, False),
    ],
)
def test_a_job_is_followed_while_it_is_active_and_ended_by_its_command_or_by_slurm(
    line: str, text: str, active: bool, ended_by_itself: bool, answer: Callable[[str], SlurmJob]
) -> None:
    state = answer(line).state()
    assert (str(state), state.active, state.ended_by_itself) == (text, active, ended_by_itself)


def test_a_slurm_that_does_not_answer_is_quoted(answer: Callable[[str], SlurmJob]) -> None:
    """It may answer again: the job is not taken for one that has ended."""
    job = answer("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmError, match="squeue: slurm_load_jobs error: Unable to contact slurm controller"):
        job.state()


def test_every_change_of_a_job_and_every_line_of_its_output_is_shown_once(
    tmp_path: Path, answer: Callable[[str], SlurmJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each poll, the job writes half a line more."""
    monkeypatch.setattr("benchbox.launch.slurm.job._POLL_S", 0.0)
    output = tmp_path / "slurm" / "job-7.log"
    states = ["PENDING|Priority", "RUNNING|None", "RUNNING|None", "RUNNING|None", "COMPLETED|None"]
    (tmp_path / "states").write_text("".join(f"{state}\n" for state in states))
    job = answer(
        f"head -n 1 {tmp_path}/states; sed -i 1d {tmp_path}/states; n=$(wc -l < {tmp_path}/states)\n"
        f'[ $n = 3 ] && printf "launch 1" >> {output}; [ $n = 1 ] && printf " ok\\nlaunch 2 ok\\n" >> {output}; true'
    )
    lines: list[str] = []
    state = job.follow(lambda: False, lines.append)
    assert str(state) == "COMPLETED"
    assert lines == [
        "Slurm job 7: PENDING (Priority)",
        "Slurm job 7: RUNNING",
        "launch 1 ok",
        "launch 2 ok",
        "Slurm job 7: COMPLETED",
    ]


NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1"


@pytest.fixture
def answers(tmp_path: Path, answer: Callable[[str], SlurmJob], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SlurmJob]:
    """Return a job of which `squeue` gives these answers, one after another; the file `asked` gets a line for each question."""
    clock = [0.0]
    monkeypatch.setattr("benchbox.launch.slurm.job.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=clock_sleep(clock)))

    def job_of(*lines: str) -> SlurmJob:
        cases = "".join(f"{number}) {line};;\n" for number, line in enumerate(lines, 1))
        return answer(f"echo >> {tmp_path}/asked\ncase $(wc -l < {tmp_path}/asked) in\n{cases}*) {lines[-1]};;\nesac")

    return job_of


def clock_sleep(clock: list[float]) -> Callable[[float], None]:
    def sleep(seconds: float) -> None:
        clock[0] += seconds

    return sleep


def test_a_slurm_that_does_not_answer_for_a_while_is_asked_again(answers: Callable[..., SlurmJob]) -> None:
    lines: list[str] = []
    job = answers("echo 'RUNNING|None'", NO_ANSWER, NO_ANSWER, "echo 'RUNNING|None'", "echo 'COMPLETED|None'")
    assert str(job.follow(lambda: False, lines.append)) == "COMPLETED"
    failure = "squeue: slurm_load_jobs error: Unable to contact slurm controller"
    assert lines == [
        "Slurm job 7: RUNNING",
        f"Slurm job 7: Slurm does not answer, and is asked again ({failure})",
        "Slurm job 7: RUNNING",
        "Slurm job 7: COMPLETED",
    ]


def test_an_answer_that_is_missing_after_hours_of_answers_ends_nothing(answers: Callable[..., SlurmJob]) -> None:
    job = answers(*["echo 'RUNNING|None'"] * 120, NO_ANSWER, "echo 'COMPLETED|None'")
    assert str(job.follow(lambda: False, lambda _: None)) == "COMPLETED"


def test_a_slurm_that_does_not_answer_for_minutes_is_an_error_that_says_how_to_follow_again(
    answers: Callable[..., SlurmJob], tmp_path: Path
) -> None:
    job = answers("echo 'RUNNING|None'", NO_ANSWER)
    with pytest.raises(SlurmError, match="controller; Slurm job 7 may go on: the same command follows it again"):
        job.follow(lambda: False, lambda _: None)
    assert len((tmp_path / "asked").read_text().splitlines()) > 60, "it was asked for ten minutes"


def test_a_job_that_runs_for_hours_is_asked_for_every_ten_seconds(answers: Callable[..., SlurmJob], tmp_path: Path) -> None:
    stops = iter([False] * 400 + [True])
    answers("echo 'RUNNING|None'").follow(lambda: next(stops), lambda _: None)
    asked = len((tmp_path / "asked").read_text().splitlines())
    assert 400 / 10 < asked < 400 / 10 + 30, "more often only in the first minutes"


def test_a_job_is_cancelled_also_where_slurm_does_not_answer_for_a_while(
    answers: Callable[..., SlurmJob], tmp_path: Path
) -> None:
    job = answers("echo 'COMPLETING|None'", NO_ANSWER, "echo 'CANCELLED|None'")
    (tmp_path / "scancel").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/cancelled\n')
    (tmp_path / "scancel").chmod(0o755)
    job.cancel(lambda _: None)
    assert (tmp_path / "cancelled").read_text() == "7\n"
    assert len((tmp_path / "asked").read_text().splitlines()) == 3


def test_ctrl_c_reaches_no_command_of_slurm(answer: Callable[[str], SlurmJob]) -> None:
    """A terminal sends it to the group of processes of this command, and a `squeue` that it ended would not answer."""
    state = answer('echo "RUNNING|$(ps -o pgid= -p $$)"').state()
    assert int(state.reason) != os.getpgrp()


def test_a_command_of_slurm_that_does_not_end_is_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_job, "_COMMAND_LIMIT_S", 0.1)
    with pytest.raises(SlurmError, match=r"sleep has not ended within 0\.1 s"):
        slurm_job._slurm("sleep", "60")
