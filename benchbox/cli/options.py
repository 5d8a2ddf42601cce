"""Arguments that several verbs share.

No `from __future__ import annotations` here or in a verb module: typer reads annotations at run time.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

# Paths are not checked by typer: the error of `load_matrix` lists the directory and suggests a file.
MatrixArgument = Annotated[
    Path, typer.Argument(metavar="MATRIX", help="A matrix file, or the name of one in matrices/.", show_default=False)
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE,..",
        default_factory=list,
        show_default=False,
        help="Override values of the matrix: size=full,axes.batch=[1,2].",
    ),
]
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


LauncherOption = Annotated[
    LauncherName,
    typer.Option(
        "--launcher",
        help="local forks ranks from a server that has imported all libraries; torchrun starts new interpreters.",
    ),
]
