"""`benchbox export`: the weights of a checkpoint as a safetensors file."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from benchbox.cli.options import PolicyDirOption


class ExportNames(StrEnum):
    """Values of `--format`."""

    benchbox = "benchbox"
    openpi = "openpi"
    lerobot = "lerobot"


class ExportDtype(StrEnum):
    """Values of `--dtype`."""

    float32 = "float32"
    bfloat16 = "bfloat16"


CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint, or the folder of a training, whose newest one is taken.", show_default=False
    ),
]
OutOption = Annotated[
    Path, typer.Option("--out", metavar="FILE|DIR", help="The file to write, or its folder.", show_default=False)
]
FormatOption = Annotated[
    ExportNames,
    typer.Option("--format", help="Names of the weights: the policy's own, or those of openpi or LeRobot (pi0 and pi05)."),
]
EmaOption = Annotated[bool, typer.Option("--ema", help="Export the averages of the weights in their place.")]
DtypeOption = Annotated[ExportDtype, typer.Option("--dtype", help="Dtype of the weights.")]


def export(
    checkpoint: CheckpointArgument,
    out: OutOption,
    policy_dirs: PolicyDirOption,
    names: FormatOption = ExportNames.benchbox,
    ema: EmaOption = False,
    dtype: DtypeOption = ExportDtype.float32,
) -> None:
    """Write the weights of a checkpoint as safetensors.

    The checkpoint is one of `benchbox train`, of any backend. Weights are those that the optimizer steps: float32 masters where
    there are masters. No ranks are started.
    """
    import torch

    from benchbox.trainer.checkpoint.export import export_checkpoint

    dtypes = {ExportDtype.float32: torch.float32, ExportDtype.bfloat16: torch.bfloat16}
    path = export_checkpoint(checkpoint, out, policy_dirs, names=names.value, dtype=dtypes[dtype], averages=ema)
    print(f"{path}: {path.stat().st_size:,} bytes")
