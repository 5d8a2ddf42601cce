"""Links between the ranks of this machine: measured by `benchbox doctor --links`, used by `benchbox estimate`."""

from typing import TYPE_CHECKING

import typer

from benchbox.errors import ConfigurationError

if TYPE_CHECKING:
    from benchbox.theory.links import MeasuredLink

MEASURED = "measured"
_EXIT_STOPPED = 130  # 128 + SIGINT


def measure_and_keep(machine: str, ranks: int) -> None:
    """Measure the links between `ranks` ranks, print the fits and keep them for this machine.

    Raises:
        CellFailedError: the group of ranks did not end ok.
    """
    from benchbox.analysis.quantities import quantity
    from benchbox.launch.links import measure_links
    from benchbox.launch.process import make_launcher
    from benchbox.launch.process.signals import stop_on_signals
    from benchbox.store.links import write_links

    if ranks < 2:
        raise ConfigurationError(f"--ranks {ranks}: a link is between at least two ranks")
    print(f"measuring all-reduce, all-gather, reduce-scatter and broadcast between {ranks} ranks", flush=True)
    with stop_on_signals() as stop:
        measured = measure_links(make_launcher("local"), ranks, stop=stop)
    if measured is None:
        raise typer.Exit(_EXIT_STOPPED)
    backend, links = measured
    print(f"{'':<16}{'latency':>12}{'bandwidth':>14}{'fit off by':>16}")
    for name, times in links.collectives.items():
        errors = f"{times['median_error']:.0%}, {times['max_error']:.0%}"
        bandwidth = f"{quantity(times['bytes_per_s'], 'bytes')}/s"
        print(f"{name:<16}{quantity(times['latency_s'], 's'):>12}{bandwidth:>14}{errors:>16}")
    largest = max(times["bytes"][-1] for times in links.collectives.values())
    print(
        f"{backend}, up to {quantity(largest, 'bytes')}: a call of B bytes takes latency + B / bandwidth; by how much the fit "
        "is off at a typical size, and at the worst"
    )
    print(f"kept in {write_links(machine, backend, links)}; `benchbox estimate` uses them")


def read_measured_link(device: str) -> "MeasuredLink | None":
    """Return the links measured on this machine between ranks on a kind of device (cpu, cuda), or None.

    Raises:
        RecordError: the file of the links is damaged.
    """
    from benchbox.measure.environment import environment
    from benchbox.store.links import read_links
    from benchbox.theory.links import MeasuredLink, link_of_fit

    backend = "nccl" if device == "cuda" else "gloo"
    links = read_links(environment()["machine"]).get(backend)
    if links is None:
        return None
    worst = max(times["median_error"] for times in links.collectives.values())
    source = (
        f"{backend} between {links.ranks} ranks of this machine, {links.measured_at[:10]}, by benchbox doctor --links; at a "
        f"typical size the fits are off by up to {worst:.0%}; other numbers of ranks take the steps of a ring"
    )
    by_operation = {
        name: link_of_fit(
            MEASURED, name, links.ranks, latency_s=times["latency_s"], bytes_per_s=times["bytes_per_s"], source=source
        )
        for name, times in links.collectives.items()
    }
    return MeasuredLink(name=MEASURED, by_operation=by_operation, source=source)
