"""Links between the ranks of this machine: measured by `benchbox doctor --links`, used by `benchbox estimate` and reports."""

from typing import TYPE_CHECKING

import typer

from benchbox.errors import EXIT_STOPPED, ConfigurationError

if TYPE_CHECKING:
    from benchbox.theory.links import MeasuredLink


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
        raise typer.Exit(EXIT_STOPPED)
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
    print(f"kept in {write_links(machine, backend, links)}; `benchbox estimate` and reports use them")


def read_measured_link(device: str) -> "MeasuredLink | None":
    """Return the links measured on this machine between ranks on a kind of device (cpu, cuda), or None.

    Raises:
        RecordError: the file of the links is damaged.
    """
    from benchbox.measure.environment import environment
    from benchbox.store.links import link_backend, read_links
    from benchbox.theory.links import measured_link

    backend = link_backend(device)
    links = read_links(environment()["machine"]).get(backend)
    return None if links is None else measured_link(backend, links)
