"""Links and devices by name, with the source of every figure, and the time that collectives and products take on them.

A collective of B bytes among n ranks on a ring takes, with latency a of a step and bandwidth b of a link,

    all-gather, reduce-scatter   (n - 1) a + (n - 1)/n B/b
    all-reduce                 2 (n - 1) a + 2 (n - 1)/n B/b
    broadcast                    (n - 1) a + B/b

(Thakur, Rabenseifner and Gropp, Int. J. High Perf. Comput. Appl. 19(1), 2005, section 4; Patarasuk and Yuan, J. Parallel
Distrib. Comput. 69(2), 2009, for the bandwidth bound of the all-reduce). Each call costs a base latency besides. Products run
at the peak of the device, and the optimizer at the bandwidth of its memory, as each is bound by it (the roofline of Williams,
Waterman and Patterson, CACM 52(4), 2009).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchbox.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchbox.store.links import MeasuredLinks

MEASURED = "measured"  # name of links that were measured
NCCL_BASE_S = 8.4e-6  # of a ring with NCCL's Simple protocol: NCCL, src/graph/tuning.cc, `baseLat`


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between neighbours on the ring: latency of a step, and bytes per second in one direction."""

    name: str
    latency_s: float
    bytes_per_s: float
    base_s: float
    source: str

    def of(self, _operation: str, /) -> Link:
        """Return the link as a collective sees it: a preset is the same for all."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """Links between the ranks of a machine as each collective saw them when it was measured.

    `error` is the relative error of the fits at a typical size, the largest over collectives.
    """

    name: str
    by_operation: Mapping[str, Link]
    source: str
    error: float

    def of(self, operation: str, /) -> Link:
        """Return the link as a collective sees it; as the all-gather does for a collective that was not measured."""
        return self.by_operation.get(operation, self.by_operation["all_gather"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator: dense products per second, and bytes of its memory per second.

    `flops_per_s` are those of 16-bit products; `float32_flops_per_s` those of float32 without TF32, which torch leaves off.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    source: str
    float32_flops_per_s: float | None = None

    def computing_in(self, dtype: str) -> Device:
        """Return the device as products of a dtype see it.

        Raises:
            UnsupportedError: their peak is not known.
        """
        if dtype in ("bfloat16", "float16"):
            return self
        if dtype != "float32" or self.float32_flops_per_s is None:
            raise UnsupportedError(f"no peak of {dtype} products is known for {self.name}")
        return replace(self, flops_per_s=self.float32_flops_per_s)


def _of_nccl(name: str, latency_s: float, bytes_per_s: float, source: str) -> Link:
    source = f"{source}; latency: NCCL, src/graph/tuning.cc, `hwLat`, ring, Simple"
    return Link(name=name, latency_s=latency_s, bytes_per_s=bytes_per_s, base_s=NCCL_BASE_S, source=source)


LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        _of_nccl("nvlink3", 3.4e-6, 300e9, "600 GB/s in both directions together: NVIDIA A100 data sheet"),
        _of_nccl("nvlink4", 3.4e-6, 450e9, "900 GB/s in both directions together: NVIDIA H100 and H200 data sheets"),
        _of_nccl("pcie4", 5.7e-6, 31.5e9, "16 lanes of 16 GT/s, 128b/130b: PCI Express Base Specification 4.0"),
        _of_nccl("pcie5", 5.7e-6, 63e9, "16 lanes of 32 GT/s, 128b/130b: PCI Express Base Specification 5.0"),
        _of_nccl("infiniband_hdr", 9.6e-6, 25e9, "200 Gb/s a port: InfiniBand Trade Association, HDR"),
        _of_nccl("infiniband_ndr", 9.6e-6, 50e9, "400 Gb/s a port: InfiniBand Trade Association, NDR"),
    )
}


def _of_data_sheet(name: str, sheet: str, *, flops_per_s: float, float32: float, bytes_per_s: float) -> Device:
    source = f"{sheet} data sheet, dense bfloat16, and float32 without TF32"
    return Device(name=name, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s, source=source, float32_flops_per_s=float32)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _of_data_sheet("a100", "NVIDIA A100 80GB SXM", flops_per_s=312e12, float32=19.5e12, bytes_per_s=2.039e12),
        _of_data_sheet("h100", "NVIDIA H100 SXM", flops_per_s=989e12, float32=67e12, bytes_per_s=3.35e12),
        _of_data_sheet("h200", "NVIDIA H200 SXM", flops_per_s=989e12, float32=67e12, bytes_per_s=4.8e12),
    )
}


def collective_time_s(operation: str, count: int, size: int, ranks: int, link: Link) -> float:
    """Return the seconds of `count` collectives of `size` bytes together, among `ranks` on a ring."""
    if ranks < 2 or not count:
        return 0.0
    rounds, share = _rounds(operation), _share(operation, ranks)
    return count * (link.base_s + rounds * (ranks - 1) * link.latency_s) + rounds * share * size / link.bytes_per_s


def link_of_fit(operation: str, ranks: int, *, latency_s: float, bytes_per_s: float, source: str) -> Link:
    """Return the link on whose ring a call of B bytes among `ranks` takes `latency_s + B / bytes_per_s`.

    A measurement at one number of ranks cannot tell the base latency of a call from that of its steps: all of it counts as
    that of steps, which grows with the number of ranks.
    """
    rounds = _rounds(operation)
    return Link(
        name=MEASURED,
        latency_s=latency_s / (rounds * (ranks - 1)),
        bytes_per_s=rounds * _share(operation, ranks) * bytes_per_s,
        base_s=0.0,
        source=source,
    )


def measured_link(backend: str, links: MeasuredLinks) -> MeasuredLink:
    """Return the links that were measured between ranks of one machine with a backend of torch.distributed."""
    error = max(times["median_error"] for times in links.collectives.values())
    source = (
        f"{backend} between {links.ranks} ranks of this machine, {links.measured_at[:10]}, by benchbox doctor --links; at a "
        f"typical size the fits are off by up to {error:.0%}; other numbers of ranks take the steps of a ring"
    )
    by_operation = {
        name: link_of_fit(name, links.ranks, latency_s=times["latency_s"], bytes_per_s=times["bytes_per_s"], source=source)
        for name, times in links.collectives.items()
    }
    return MeasuredLink(name=MEASURED, by_operation=by_operation, source=source, error=error)


def _rounds(operation: str) -> int:
    return 2 if operation == "all_reduce" else 1


def _share(operation: str, ranks: int) -> float:
    return 1.0 if operation == "broadcast" else (ranks - 1) / ranks


def traffic_time_s(traffic: Mapping[str, Mapping[str, int]], ranks: int, link: Link | MeasuredLink) -> float:
    """Return the seconds of all collectives of a step if none overlaps with computation: an upper bound of their share."""
    return sum(collective_time_s(name, entry["count"], entry["bytes"], ranks, link.of(name)) for name, entry in traffic.items())


def compute_time_s(flops: int, optimizer_bytes: int, device: Device) -> float:
    """Return the seconds of products at the peak, and of the optimizer at the memory's bandwidth: a lower bound."""
    return flops / device.flops_per_s + optimizer_bytes / device.bytes_per_s
