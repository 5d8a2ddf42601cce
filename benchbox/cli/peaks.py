"""Peaks of the devices of this machine: measured by `benchbox doctor --peaks`, used by `benchbox profile` and reports."""

import typer

from benchbox.errors import EXIT_STOPPED, ConfigurationError


def measure_and_keep_peaks(machine: str, ranks: int) -> None:
    """Measure what each of `ranks` ranks reaches while all of them work, print it and keep it for this machine.

    Raises:
        CellFailedError: the group of ranks did not end ok.
    """
    from benchbox.analysis.quantities import counted, quantity
    from benchbox.launch.peaks import measure_peaks
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.registry.products import SHAPE_CLASSES
    from benchbox.store.peaks import write_peaks

    if ranks < 1:
        raise ConfigurationError(f"--ranks {ranks}: at least one rank must work")
    print(f"measuring products, copies and all-reduces on {counted(ranks, 'rank')} at once", flush=True)
    with stop_on_signals() as stop:
        peaks = measure_peaks(make_launcher("local"), ranks, stop=stop)
    if peaks is None:
        raise typer.Exit(EXIT_STOPPED)
    rows = [
        (f"{dtype} {name}", " x ".join(map(str, rate["size"])), f"{quantity(rate['per_s'], 'FLOP')}/s", rate)
        for dtype, rates in peaks.matmul.items()
        for name, rate in rates.items()
    ]
    for name, collective in (("copy", peaks.copy), ("update in place", peaks.update), ("all-reduce", peaks.all_reduce)):
        if collective is not None:
            size = quantity(collective["size"][0], "bytes")
            rows.append((name, size, f"{quantity(collective['per_s'], 'bytes')}/s", collective))
    print(f"{'':<20}{'size':>24}{'of each rank':>16}{'spread':>10}")
    for name, size, text, rate in rows:
        print(f"{name:<20}{size:>24}{text:>16}{rate['spread']:>10.1%}")
    if uncertain := peaks.uncertainty(peaks.matmul):
        print(f"warning: {uncertain}: measure again when nothing else runs on this machine")
    for shape, meaning in SHAPE_CLASSES.items():
        print(f"{shape}: {meaning}; sizes are batch x rows x columns x inner" if shape == "large" else f"{shape}: {meaning}")
    print(f"{peaks.group}, torch {peaks.torch}; the median of the slowest rank, and the interquartile range of its repetitions")
    print(f"kept in {write_peaks(machine, peaks)}; `benchbox profile` and reports use them")
