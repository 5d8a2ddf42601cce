"""Computation of statistics that the data of a run does not have stored, before any rank needs them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from benchbox.spec.cell import DataSpec


def prepare_statistics(data: "DataSpec", console: "Console") -> None:
    """Compute and cache missing statistics of a LeRobot dataset, with progress, and say where they are.

    Raises:
        DataError: the dataset is missing or damaged.
    """
    if data.kind != "lerobot" or data.path is None:
        return
    from rich.progress import Progress

    from benchbox.data.lerobot import open_training_dataset

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("statistics", visible=False)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        _, cached_in = open_training_dataset(data.path, show)
    if cached_in is not None:
        console.print(f"statistics that {data.path} does not store are in {cached_in}", markup=False, soft_wrap=True)
