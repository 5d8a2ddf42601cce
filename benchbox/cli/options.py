"""Arguments that several verbs share.

No `from __future__ import annotations` here or in a verb module: typer reads annotations at run time.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

# Paths are not checked by typer: the error of `load_matrix` lists the directory and suggests a file.
MatrixArgument = Annotated[
    Path, typer.Argument(metavar="MATRIX", help="A matrix file, or the name of one in matrices/.", show_default=False)
]


def _set_option(help_text: str) -> Any:
    """Return the option `--set` of a verb."""
    return typer.Option("--set", metavar="KEY=VALUE,..", default_factory=list, show_default=False, help=help_text)


SetOption = Annotated[list[str], _set_option("Override values of the matrix: size=full,axes.batch=[1,2].")]
TrainingSetOption = Annotated[list[str], _set_option("Override values of the training file: size=full,optim.lr=1e-4.")]
OnlyOption = Annotated[
    list[str],
    typer.Option(
        "--only",
        metavar="EXPR",
        default_factory=list,
        show_default=False,
        help="Only these cells: backend=zero2, cams!=1, backend in [zero2,ddp]. Given several times, all must hold.",
    ),
]
PolicyDirOption = Annotated[
    list[Path],
    typer.Option(
        "--policy-dir", metavar="DIR", default_factory=list, show_default=False, help="An additional folder of policies."
    ),
]


class Format(StrEnum):
    """Output format."""

    text = "text"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]


class LauncherName(StrEnum):
    """Values of `--launcher`."""

    local = "local"
    torchrun = "torchrun"


class TrainingLauncherName(StrEnum):
    """Values of `--launcher` where ranks may run on other machines."""

    local = "local"
    torchrun = "torchrun"
    slurm = "slurm"


TrainingLauncherOption = Annotated[
    TrainingLauncherName,
    typer.Option(
        "--launcher",
        help="local forks ranks from a server that has imported all libraries; torchrun starts new interpreters, on all "
        "nodes; slurm submits this command as a job.",
    ),
]

NnodesOption = Annotated[
    int, typer.Option("--nnodes", metavar="N", envvar="NNODES", help="Nodes; the same command is started on each.")
]
NodeRankOption = Annotated[
    int | None,
    typer.Option("--node-rank", metavar="R", envvar="NODE_RANK", help="Rank of this node; node 0 writes the records."),
]
MasterAddrOption = Annotated[
    str | None,
    typer.Option("--master-addr", metavar="HOST", envvar="MASTER_ADDR", help="Address of node 0, for several nodes."),
]
MasterPortOption = Annotated[
    int, typer.Option("--master-port", metavar="PORT", envvar="MASTER_PORT", help="Free port of node 0, for several nodes.")
]
NodeTimeoutOption = Annotated[
    float,
    typer.Option("--node-timeout", metavar="S", help="Seconds until a node that does not join or report counts as lost."),
]

LauncherOption = Annotated[
    LauncherName,
    typer.Option(
        "--launcher",
        help="local forks ranks from a server that has imported all libraries; torchrun starts new interpreters.",
    ),
]
