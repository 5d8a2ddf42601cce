"""`benchbox validate`: the validation of a checkpoint, without training."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchbox.cli.export import CheckpointArgument
from benchbox.cli.options import PolicyDirOption

if TYPE_CHECKING:
    from collections.abc import Mapping

DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="PATH", help="A LeRobot dataset.", show_default="the data of the training"),
]
AllEpisodesOption = Annotated[
    bool, typer.Option("--all-episodes", help="Validate on all episodes, not on those only that data.validation chooses.")
]
EmaOption = Annotated[bool, typer.Option("--ema", help="Validate the averages of the weights, in their place.")]
BatchOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Samples of a forward pass.", show_default="that of the training")
]
MaxSamplesOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="So many samples at equal distances.", show_default="all")
]
WorkersOption = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Loader processes.", show_default="those of the training")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="FILE.json", help="Also write the record to this file.", show_default=False)
]


def validate(
    checkpoint: CheckpointArgument,
    policy_dirs: PolicyDirOption,
    data: DataOption = None,
    all_episodes: AllEpisodesOption = False,
    ema: EmaOption = False,
    batch: BatchOption = None,
    max_samples: MaxSamplesOption = None,
    workers: WorkersOption = None,
    out: OutOption = None,
) -> None:
    """Compute the validation loss of a checkpoint.

    The pass is that of the training. One process computes it in the precision of the training, whichever backend trained. On
    the data of the training it is the loss in validation.jsonl, up to rounding; other data are normalised by statistics of
    their own.
    """
    from benchbox.cli.outputs import check_file
    from benchbox.store.files import write_json
    from benchbox.trainer.checkpoint_validation import CheckpointValidation, validate_checkpoint

    if out is not None:
        check_file(out)
    settings = CheckpointValidation(
        data=data, all_episodes=all_episodes, averages=ema, batch=batch, max_samples=max_samples, workers=workers
    )
    record = validate_checkpoint(checkpoint, settings, policy_dirs)
    _print_record(record)
    if out is not None:
        write_json(out, record)


def _print_record(record: "Mapping[str, Any]") -> None:
    weights = ", averages of the weights" if record["evaluated_weights"] == "averages" else ""
    terms = "".join(f"  {name} {value:.4f}" for name, value in {**record["terms"], **record.get("parts", {})}.items())
    print(f"{record['checkpoint']['name']}{weights}, {record['recipe']}: loss {record['loss']:.4f}{terms}")
    print(f"{record['samples']:,} samples of {record['episodes']} episodes in {record['seconds']:.1f} s")
    if "reason" in record:
        print(record["reason"])
    for line in record.get("data_changes", ()):
        print(
            f"warning: the data of the training have changed, perhaps also their statistics or FAST tokens: {line}",
            file=sys.stderr,
        )
    for group in record.get("groups", ()):
        mode = "" if group["control_mode"] == "unknown" else f", {group['control_mode']}"
        print(f"  {group['dataset']}{mode}: loss {group['loss']:.4f} of {group['samples']:,} samples")
