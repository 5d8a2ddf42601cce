"""Tests of `benchbox audit-precision -- CMD` with real launchers, in an environment without benchbox."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from benchbox.launch.process.environment import host_variables
from tests.support.commands import run_in_process
from tests.support.tiers import in_tiers

pytestmark = pytest.mark.ranks

SCRIPTS = Path(__file__).parents[1] / "command_scripts"
AUDIT = [sys.executable, "-m", "benchbox.cli.app", "audit-precision"]
TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """The variables of an environment with torch, accelerate, deepspeed and their launchers, but no benchbox."""
    folder = tmp_path_factory.mktemp("foreign")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    (site_packages,) = (folder / "lib").glob("python*/site-packages")
    # Path files inside a folder named by a path file are not read: packages are borrowed, editable installs are not.
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("torchrun", "accelerate", "deepspeed"):
        script = Path(sys.executable).with_name(name).read_text().partition("\n")[2]
        (folder / "bin" / name).write_text(f"#!{python}\n{script}")
        (folder / "bin" / name).chmod(0o755)
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    extensions = host_variables({})["TORCH_EXTENSIONS_DIR"]  # compiled once
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja is in ours
    variables |= {"PATH": path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": extensions}
    imports = "from importlib.util import find_spec; assert find_spec('torch'); import benchbox.cli"
    probe = subprocess.run([python, "-c", imports], env=variables, cwd=folder, capture_output=True, text=True, timeout=60)
    assert "No module named 'benchbox" in probe.stderr, "torch is there, and benchbox is not"
    return variables


@pytest.fixture(scope="module")
def extension(foreign):
    """Compile what DeepSpeed needs: a test run that was killed while it did so would make every later one wait for ever."""
    build = "from benchbox.backends.extension import build_extension; build_extension()"
    subprocess.run([sys.executable, "-c", build], env=os.environ | foreign, check=True, timeout=300)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def audit(foreign, tmp_path):
    """Audit a command in the process of the test. What the command itself prints is not in the result."""

    def audit(*words):
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ.keys() - foreign.keys():
                patch.delenv(name)
            return run_in_process("audit-precision", *words, cwd=tmp_path, variables=foreign)

    return audit


@pytest.fixture
def run(foreign, tmp_path):
    def run(*command, **variables):
        return subprocess.run(
            command, env=foreign | variables, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def results(printed):
    """Return the lines that the script itself printed: launchers add times and process ids, and ranks end no line in time."""
    return re.findall(r"result .*", printed)


def codes(report):
    return {finding["code"] for finding in report["findings"]}


COMMANDS = {
    "python": ("python", SCRIPTS / "odd_things.py"),
    "torchrun": (*TORCHRUN, SCRIPTS / "casts_its_model.py"),
    "fork": ("python", SCRIPTS / "casts_its_model.py", "--start", "fork", "--float32"),  # what bfloat16 would round away
    "accelerate": (
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
        *("--main_process_port", "{port}", "--dynamo_backend", "no", SCRIPTS / "several_ranks.py", "accelerate"),
    ),
    "deepspeed": ("deepspeed", "--num_gpus", "2", "--master_port", "{port}", SCRIPTS / "several_ranks.py", "deepspeed"),
}
RESULTS = {
    "python": 27,
    "torchrun": 13,
    "fork": 13,
    "accelerate": 9,
    "deepspeed": 9,
}  # losses of the steps, and hashes of the weights
over_launchers = pytest.mark.parametrize("launcher", in_tiers(COMMANDS, ("python", "torchrun", "fork").__contains__))


def command_of(launcher):
    """Return a command with a free port: the default one may be taken, by another test run on this machine for example."""
    return [str(part).format(port=free_port()) for part in COMMANDS[launcher]]


@pytest.fixture(scope="module")
def run_once(request, foreign, tmp_path_factory):
    """Return the finished command of a launcher behind some words, which is run once."""

    @cache
    def run_once(launcher, *words):
        if launcher == "deepspeed":
            request.getfixturevalue("extension")
        folder = tmp_path_factory.mktemp(launcher)
        command = [*words, *command_of(launcher)]
        return subprocess.run(command, env=foreign, cwd=folder, capture_output=True, text=True, timeout=300, check=False)

    return run_once


@pytest.fixture(scope="module")
def audited(run_once):
    return lambda launcher: run_once(launcher, *AUDIT, "--steps", "6", "--")


@over_launchers
def test_the_command_of_every_launcher_runs_to_its_end_and_is_observed(audited, launcher):
    done = audited(launcher)
    assert done.returncode in {"python": (3,)}.get(launcher, (0, 4)), done.stderr
    assert len(results(done.stdout)) == RESULTS[launcher]
    assert ": 6 steps seen\n" in done.stdout


# Ranks of torchrun are interpreters as those of "python", and ranks of one training as those of "fork".
@pytest.mark.parametrize("launcher", in_tiers(COMMANDS, ("python", "fork").__contains__))
def test_losses_weights_and_random_numbers_are_bit_for_bit_those_of_the_command_alone(run_once, audited, launcher):
    """With dropout, data workers, closures, clipping and a compiled model in one process, and on two ranks of each launcher."""
    alone = run_once(launcher)
    assert alone.returncode == {"python": 5}.get(launcher, 0), alone.stderr
    assert results(audited(launcher).stdout) == results(alone.stdout) != []


def test_a_ddp_script_that_casts_its_model_gets_its_losses_and_the_repair(audited):
    done = audited("torchrun")
    assert done.returncode == 4, done.stderr
    assert len(results(done.stdout)) == RESULTS["torchrun"], "the command runs to its end"
    report = done.stdout[done.stdout.index("BXP101") :]
    for expected in ("BXP201", "0.weight, 0.bias, 2.weight, 2.bias", "2,128", "0.999", "exp_avg_sq", "torch.autocast"):
        assert expected in report
    script = (SCRIPTS / "casts_its_model.py").read_text().splitlines()
    for what, code in (("cast at", "model.bfloat16()"), ("optimizer built at", "= PolicyAdamW(")):
        (line,) = [number for number, text in enumerate(script, 1) if code in text]
        assert re.search(rf"{what} +{re.escape(str(SCRIPTS))}/casts_its_model.py:{line} in train ", report), report
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "BXP101" in done.stderr
    assert "BXP201" in done.stderr


def test_a_subclass_that_leaves_the_arithmetic_to_adamw_is_as_known_as_adamw(audited):
    report = audited("torchrun").stdout
    assert set(re.findall(r"^  where +(.*)$", report, re.MULTILINE)) == {"PolicyAdamW", "gradients"}
    assert "BXP102 error" in report
    (clean,) = (line for line in report.splitlines() if line.startswith("clean: "))
    assert "BXP604" in clean


def without_leaks(text):
    """Return text without the list of objects that Triton leaks in any process: its addresses and order differ between runs."""
    return re.sub(r"nanobind: leaked .*?refleaks\.html\n?", "", text, flags=re.DOTALL)


def test_objects_that_the_observer_cannot_read_change_neither_output_nor_exit_code(run_once, audited):
    """Its script steps complex, sparse and absent tensors, forgets its state, trains in threads and forks, and makes errors of
    warnings."""
    alone, observed = run_once("python"), audited("python")
    assert alone.returncode == 5, alone.stderr
    assert observed.stdout.startswith(alone.stdout)
    assert without_leaks(observed.stderr).startswith(without_leaks(alone.stderr))
    assert observed.returncode == 3
    assert "error: the command failed: exit code 5" in observed.stderr


@pytest.mark.parametrize("start", in_tiers(("fork", "spawn"), "fork".__eq__))
def test_a_failed_rank_is_reported_with_the_facts_of_all_ranks(run, start):
    """Ranks that torch.multiprocessing starts know their number only from the process group; the one that is killed cannot
    write anything at its end."""
    command = ("python", SCRIPTS / "casts_its_model.py", "--start", start, "--fail")
    audited = run(*AUDIT, "--format", "json", "--", *command)
    assert audited.returncode == 3
    assert "RuntimeError: out of data" in audited.stderr
    assert audited.stderr.splitlines()[-1] == "error: the command failed: exit code 1"
    report = json.loads(audited.stdout)
    assert report["subject"]["ranks"] == [0, 1]
    assert report["subject"]["world_size"] == 2
    assert codes(report) >= {"BXP101", "BXP201"}


STARTS = {"fork": ("python", SCRIPTS / "casts_its_model.py", "--start", "fork"), "torchrun": COMMANDS["torchrun"]}


@pytest.mark.parametrize("start", in_tiers(STARTS, "fork".__eq__))
def test_stop_ends_the_command_after_its_observed_steps_and_a_recipe_declares_its_precision(run, start):
    """Only the report is on stdout."""
    command = (*STARTS[start], "--steps", "1000000")
    audited = run(*AUDIT, "--stop", "--steps", "5", "--recipe", "fp32", "--format", "json", "--", *command)
    assert audited.returncode == 4, audited.stderr
    assert "benchbox: 5 steps seen on 2 ranks; the command is ended" in audited.stderr
    assert codes(json.loads(audited.stdout)) >= {"BXP101", "BXP604"}


def test_stop_ends_the_command_of_each_of_two_machines(foreign, tmp_path):
    """A rank of the other machine leaves no trace on this one."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    group |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    script = ("python", SCRIPTS / "casts_its_model.py", "--steps", "1000000")
    audits = [
        subprocess.Popen(
            [*AUDIT, "--stop", "--steps", "5", "--format", "json", "--", *script],
            env=foreign | group | {"RANK": str(machine), "GROUP_RANK": str(machine)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for machine in range(2)
    ]
    for machine, audit in enumerate(audits):
        report, messages = audit.communicate(timeout=300)
        assert "benchbox: 5 steps seen on 1 rank; the command is ended" in messages
        subject = json.loads(report)["subject"]
        assert (subject["ranks"], subject["world_size"], subject["steps"]) == ([machine], 2, 5)


def test_the_command_gets_ctrl_c_and_the_keyboard(foreign, tmp_path):
    """On a terminal, the command reads what is typed, Ctrl-C ends it, and the observed steps are reported nevertheless."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execvpe(AUDIT[0], [*AUDIT, "--steps", "3", "--", "python", str(SCRIPTS / "reads_a_line.py")], foreign)
    os.write(terminal, b"typed\n")
    output = ""
    interrupted = False
    while True:
        try:
            part = os.read(terminal, 4096).decode()
        except OSError:  # the other side is gone
            break
        output += part
        if "trains" in output and not interrupted:
            os.write(terminal, b"\x03")
            interrupted = True
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert "read: typed" in output
    assert "KeyboardInterrupt" in output
    assert (
        output.index("KeyboardInterrupt") < output.index("clean") < output.index("error: the command failed: ended by SIGINT")
    )


def test_an_existing_sitecustomize_runs_and_the_path_is_unchanged(run, tmp_path):
    (tmp_path / "existing").mkdir()
    existing = tmp_path / "existing" / "sitecustomize.py"
    existing.write_text("import sys\nsys.customised = True\n")
    program = "import sys, sitecustomize; print(sys.customised, sitecustomize.__file__, sys.path[:2])"
    audited = run(*AUDIT, "--", "python", "-c", program, PYTHONPATH=str(existing.parent))
    assert audited.stdout == f"True {existing} ['', '{existing.parent}']\n"
    assert audited.returncode == 3
    assert audited.stderr == "error: no optimizer step was seen: no Python that the command started imported torch\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (("python", "-c", "import torch"), "torch was imported, and no torch.optim.Optimizer took a step"),
        (("python", "-I", "-c", "pass"), "no Python of the command could be looked into"),
        (("false",), "the command failed (exit code 1), and no optimizer step was seen"),
    ],
)
def test_a_command_without_an_observed_step_explains_why(audit, command, reason):
    done = audit("--", *command)
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert reason in line


def test_a_command_that_cannot_be_run_is_one_line(audit, tmp_path):
    script = SCRIPTS / "one_process.py"
    (tmp_path / "x.py").touch()
    for command, line in (
        (("x.py",), "error: -- x.py: no such command; give it to its interpreter: python x.py"),
        (("y.py",), "error: -- y.py: no such command; is its environment active?"),
        (("torchrum", "x.py"), "error: -- torchrum: no such command; is its environment active?"),
        ((str(script),), f"error: -- {script}: cannot be run: Permission denied; give it to its interpreter: python {script}"),
        (("/etc/passwd",), "error: -- /etc/passwd: cannot be run: Permission denied"),
    ):
        done = audit("--", *command)
        assert (done.returncode, done.stdout, done.stderr.splitlines()) == (2, "", [line])


def test_options_after_the_first_argument_belong_to_the_command(audit):
    done = audit("torchrum", "--format", "of another program")
    assert done.stderr.splitlines() == ["error: -- torchrum: no such command; is its environment active?"]


def test_a_command_that_skips_every_step_is_reported_as_such(run):
    done = run(*AUDIT, "--format", "json", "--", "python", SCRIPTS / "skips_every_step.py")
    assert done.returncode == 4, done.stderr
    (finding,) = json.loads(done.stdout)["findings"]
    assert (finding["code"], finding["evidence"]["steps"], finding["evidence"]["skipped"]) == ("BXP305", 4, 4)


def test_a_command_whose_observer_fails_at_once_is_not_said_to_train_nothing(audit):
    """The exception happens in the first call of an optimizer, before any facts were written."""
    done = audit("--", "python", SCRIPTS / "breaks_the_observer.py")
    assert done.returncode == 3
    assert "error: the observer stopped watching on rank 0: before_call: KeyError: 'eps'" in done.stderr
    assert "BXP604 unknown" in done.stdout
