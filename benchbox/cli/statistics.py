"""Preparation of the data of a run before any rank starts: missing statistics, and the choice of its video decoder."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.spec.cell import DataSpec


def prepare_statistics(data: "DataSpec", console: "Console") -> None:
    """Compute and cache missing statistics of a LeRobot dataset, with progress, and say where they are.

    Where several decoders are installed, the one of its videos is chosen too.

    Raises:
        ConfigurationError: the requested decoder is not installed.
        DataError: the dataset is missing or damaged.
    """
    if data.kind != "lerobot" or data.path is None:
        return
    from rich.progress import Progress

    from benchbox.data.decoders import choose_decoder, installed_decoders
    from benchbox.data.lerobot import open_training_dataset

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("statistics", visible=False)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        dataset, cached_in = open_training_dataset(data.path, show)
    if cached_in is not None:
        console.print(f"statistics that {data.path} does not store are in {cached_in}", markup=False, soft_wrap=True)
    decoder = choose_decoder(dataset.metadata, data.decoder)
    if len(installed_decoders()) > 1:
        console.print(f"videos of {data.path} are decoded by {decoder}", markup=False, soft_wrap=True)
