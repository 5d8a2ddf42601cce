"""Table of the corpus: the command of each script, the environment that it runs in, and what an audit has to say about it."""

from __future__ import annotations

from dataclasses import dataclass, field

TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2")
ACCELERATE = (
    *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
# Consequences of 16-bit weights, which may be findings of their own or be listed under BXP101.
OF_16_BIT_WEIGHTS = ("BXP102", "BXP103", "BXP106", "BXP201", "BXP202", "BXP203", "BXP204", "BXP301")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command to run in `scripts/`, and the expected outcome of its audit.

    Args:
        mistake: what is wrong in the script, in a few words; None: it is clean, and an audit must be silent.
        codes: rules of which at least one must report the mistake.
        also: rules that may report it as well. Any other finding is a false alarm.
        info: the mistake may be reported as information only.
        unobserved: the audit may say that it could not observe the steps (exit code 3).
        repair: a part of the repair that the report must propose, in the words of the library that trains.
        outputs: patterns of files whose bytes must be the same with and without the audit.
        ci: whether the plain test suite audits it, in one process with the others that it selects.
        timeout_s: of one run.
    """

    name: str
    command: tuple[str, ...]
    environment: str = "base"
    variables: dict[str, str] = field(default_factory=dict)
    mistake: str | None = None
    codes: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    info: bool = False
    unobserved: bool = False
    repair: str = ""
    outputs: tuple[str, ...] = ()
    ci: bool = False
    timeout_s: int = 600

    def __post_init__(self) -> None:
        if bool(self.mistake) != bool(self.codes):
            raise ValueError(f"{self.name}: a mistake needs the codes that report it")


def clean(name: str, *command: str, **options: object) -> Case:
    """Return a case whose audit must be silent."""
    return Case(name=name, command=command, **options)  # type: ignore[arg-type]


def mistaken(name: str, mistake: str, codes: str, *command: str, **options: object) -> Case:
    """Return a case whose audit must report one of the codes."""
    return Case(name=name, command=command, mistake=mistake, codes=tuple(codes.split()), **options)  # type: ignore[arg-type]


def cast(name: str, *command: str, opaque: bool = False, **options: object) -> Case:
    """Return a case with the commonest mistake: weights in bfloat16 without anything that keeps what rounding loses.

    Args:
        name: of the case.
        command: of the case.
        opaque: whether an audit may say that the optimizer is unknown: it might keep what rounding loses.
        options: further fields of the case.
    """
    codes = "BXP101 BXP604" if opaque else "BXP101"
    return mistaken(name, "weights are stepped in bfloat16", codes, *command, also=OF_16_BIT_WEIGHTS, **options)
