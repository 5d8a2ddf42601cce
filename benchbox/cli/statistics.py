"""Preparation of the data of a run before any rank starts: missing statistics, decoders, and a summary of what is drawn."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.progress import TaskID

    from benchbox.spec.cell import DataSpec


def prepare_statistics(data: "DataSpec", seeds: "Iterable[int]", console: "Console") -> None:
    """Compute and cache missing statistics of all LeRobot datasets, with progress, and say where they are and what is drawn.

    What is drawn is said of the first seed. Another seed divides a dataset that is named once into as many episodes.
    Where several decoders are installed, the one of its videos is chosen too.

    Raises:
        DataError: a dataset or a keep file is missing or damaged.
        ConfigurationError: a keep file names frames that its dataset does not have, or the requested decoder is not installed.
    """
    if not data.lerobot_datasets:
        return
    from functools import partial

    from rich.progress import Progress

    from benchbox.data.dataset.lerobot import open_training_dataset
    from benchbox.data.samples.description import summarise_selection
    from benchbox.data.samples.mixture import drawn_shares, select_datasets
    from benchbox.data.video.decoders import choose_decoder, installed_decoders
    from benchbox.report.rows import say

    opened, lines = [], []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:

        def show(task: "TaskID", done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        for settings in data.lerobot_datasets:
            task = progress.add_task(f"statistics of {settings.path}", visible=False)
            dataset, cached_in = open_training_dataset(settings.path, partial(show, task))
            opened.append((dataset, settings))
            if cached_in is not None:
                lines.append(f"statistics that {settings.path} does not store are in {cached_in}")
            decoder = choose_decoder(dataset.metadata, data.decoder)
            if len(installed_decoders()) > 1:
                lines.append(f"videos of {settings.path} are decoded by {decoder}")
    members, *_ = [select_datasets(opened, validation=data.validation, seed=seed) for seed in dict.fromkeys(seeds)]
    if data.datasets or data.validation:
        lines += map(summarise_selection, members, drawn_shares(members))
    for line in lines:
        say(console, line)
