"""`benchbox train --dry-run`: the resolved plan of a training, without starting it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchbox.spec.train import TrainConfig
    from benchbox.trainer.preview import GroupPreview, TrainingPreview

_PLOT_WIDTH = 48


def preview(config: "TrainConfig", path: Path | None, overrides: "Mapping[str, str]", drawing: Path | None) -> None:
    """Check a training, and print its plan, its parameter groups and its schedule.

    Args:
        path: the training file, in which errors are located; None where there is none.
        drawing: file that the schedule is drawn into as SVG.
    """
    from benchbox.errors import ConfigurationError, Problem
    from benchbox.report.schedule import draw_svg
    from benchbox.spec.train import locate_problems, schedule_note
    from benchbox.trainer.preview import preview_training

    try:
        previewed = preview_training(config, config.policy_dirs)
    except ConfigurationError as error:
        problems = error.problems if path is None else locate_problems(error.problems, path, overrides)
        raise ConfigurationError(problems) from error
    _print_plan(config, previewed)
    _print_groups(config, previewed)
    curves = _curves(previewed.groups)
    _print_schedule(config, curves)
    if note := schedule_note(config):
        print(f"note: {note}")
    for warning in previewed.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if drawing is not None:
        try:
            drawing.write_text(draw_svg(curves, f"Learning rates of {config.name}: {config.cell.optim.schedule}"))
        except OSError as error:
            raise ConfigurationError(Problem(f"--figure {drawing}", f"cannot be written: {error.strerror}")) from error
        print(f"\nfigure: {drawing}")


def _print_plan(config: "TrainConfig", previewed: "TrainingPreview") -> None:
    cell = config.cell
    samples = config.steps * cell.samples_per_step
    print(f"{config.name}: cell {cell.cell_id}, {cell.policy} {cell.size}, {cell.backend}, {cell.recipe}, seed {cell.seed}")
    print(
        f"{config.steps} steps of {cell.batch} samples x {cell.accumulation} micro-steps x {cell.world_size} ranks"
        f" = {samples} samples"
    )
    _print_data(config, previewed)
    optim = cell.optim
    if optim.freeze_backbone_steps:
        print(f"the backbone is frozen for {optim.freeze_backbone_steps} steps, then warms up for {optim.thaw_warmup_steps}")
    if optim.ema_decay is not None:
        print(f"averages of the weights: decay {optim.ema_decay:g}{' with warm-up' if optim.ema_warmup else ''}")
    if optim.spike is not None:
        spike = optim.spike
        bound = f"{spike.max:g}" if spike.max is not None else f"{spike.factor:g} times the median of {spike.window}"
        print(f"gradient norms above {bound}: {spike.action}")
    _print_intervals(config)


def _print_data(config: "TrainConfig", previewed: "TrainingPreview") -> None:
    """Print how often the samples are drawn: of each dataset, where datasets have weights, and so epochs of their own."""
    data, datasets = config.cell.data, previewed.datasets
    samples = config.steps * config.cell.samples_per_step
    frames = sum(dataset["training_frames"] for dataset in datasets)
    if not datasets:
        print(f"data: {data.label}, generated without end; {data.reading}")
    elif len(datasets) == 1 or datasets[0]["weight"] is None:
        print(f"data: {data.label}, {frames} samples, {samples / frames:.3g} epochs; {data.reading}")
    else:
        print(f"data: {data.label}, {frames} samples, drawn by weight; {data.reading}")
        for dataset in datasets:
            share, training = dataset["share"], dataset["training_frames"]
            epochs = samples * share / training
            print(f"  {dataset['dataset']}: {training} samples, {share:.1%} of those drawn, {epochs:.3g} epochs")


def _print_intervals(config: "TrainConfig") -> None:
    """Print how often the training saves and validates."""
    checkpoint, validation = config.checkpoint, config.validation
    if checkpoint.every:
        best = checkpoint.keep_best
        best_text = "" if best is None else f", and the {best.count} of {best.mode} {best.metric}"
        print(f"checkpoints: every {checkpoint.every} steps and at the end; the newest {checkpoint.keep} are kept{best_text}")
    else:
        print("checkpoints: none; checkpoint.every is 0")
    if validation.every:
        of = " of the averages" if validation.weights == "averages" else ""
        print(f"validation{of}: every {validation.every} steps and at the end")


def _print_groups(config: "TrainConfig", previewed: "TrainingPreview") -> None:
    from benchbox.analysis.quantities import quantity

    def size(count: int) -> str:
        return quantity(count, "bytes") if count else "-"

    header = ["group", "tensors", "elements", "lr", "decay", "betas", "weights", "masters", "moments"]
    averages = config.cell.optim.ema_decay is not None
    rows = []
    for group in previewed.groups:
        plan = group.plan
        numbers = [plan.name, str(group.tensors), f"{group.elements:,}", f"{plan.lr:g}", f"{plan.weight_decay:g}"]
        counts = [group.weights_bytes, group.masters_bytes, group.moments_bytes, *([group.averages_bytes] if averages else [])]
        rows.append([*numbers, "{:g} {:g}".format(*plan.betas), *map(size, counts)])
    sums = [
        sum(getattr(group, f"{kind}_bytes") for group in previewed.groups)
        for kind in ("weights", "masters", "moments", *(["averages"] if averages else []))
    ]
    tensors, elements = (sum(getattr(group, kind) for group in previewed.groups) for kind in ("tensors", "elements"))
    rows.append(["all", str(tensors), f"{elements:,}", "", "", "", *map(size, sums)])
    table = [header + ["averages"] * averages, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for row in table:
        cells = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
    if previewed.frozen_elements:
        print(f"{previewed.frozen_elements:,} elements never train")
    print("bytes are of one copy of whole tensors; sharding divides them by ranks, replication multiplies them")
    if config.cell.backend.startswith(("fsdp", "hsdp")) and any(group.masters_bytes for group in previewed.groups):
        print("FSDP keeps the masters as its parameters, and has the weights of the units that are gathered only")


def _curves(groups: "Sequence[GroupPreview]") -> dict[str, tuple[float, ...]]:
    """Return the rates of all groups by the names of the groups that have them."""
    names: dict[tuple[float, ...], list[str]] = {}
    for group in groups:
        names.setdefault(group.rates, []).append(group.plan.name)
    return {"; ".join(labels): rates for rates, labels in names.items()}


def _print_schedule(config: "TrainConfig", curves: "Mapping[str, Sequence[float]]") -> None:
    from benchbox.report.schedule import draw_bars

    print(f"\nlearning rate over {config.steps} steps ({config.cell.optim.schedule}): first .. highest .. last")
    highest = max(max(rates) for rates in curves.values())
    for name, rates in curves.items():
        first, last = rates[0], rates[-1]
        print(f"  {name}\n  |{draw_bars(rates, highest, _PLOT_WIDTH)}|  {first:.2e} .. {max(rates):.2e} .. {last:.2e}")
