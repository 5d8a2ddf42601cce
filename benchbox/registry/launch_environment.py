"""The machine, the software and the settings of a launch, as its record has them."""

from __future__ import annotations

from typing import TypedDict

# Beginnings of variables by which `accelerate launch` configures a program. accelerate reads what it is not given from them.
ACCELERATE_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


class GitState(TypedDict):
    """The commit of the working directory's repository."""

    commit: str
    dirty: bool | None  # whether tracked files differ from it; null where git did not say


class RankEnvironment(TypedDict, total=False):
    """The environment that one rank observed. Records of an older benchbox lack the keys that it did not know."""

    machine: str  # file name for this kind of machine; of several nodes, for all of them
    benchbox: str  # versions, from here on
    python: str
    torch: str
    accelerate: str | None
    deepspeed: str | None
    transformers: str | None
    platform: str
    cpu: str
    cpu_capability: str | None  # widest vector instructions that torch uses, such as AVX512; null where a device computes
    cores: int  # physical ones
    usable_cores: int | None  # that this process may run on
    memory_bytes: int
    threads: int  # of torch
    devices: list[str]  # names of the GPUs that the rank sees
    driver: str | None  # version of NVIDIA's driver
    cuda: str | None
    nccl: str | None
    variables: dict[str, str | None]  # null where not set; `(set)` stands for a private value
    numerics: dict[str, bool | str]  # of torch that change the arithmetic or the choice of kernels
    git: GitState | None  # null outside a repository
    node: int  # number and name of the host, where the launch has several nodes
    host: str


class NodeEnvironment(RankEnvironment, total=False):
    """The environment of one node of a launch on several."""

    ranks: list[int]


class LaunchEnvironment(RankEnvironment, total=False):
    """The environment of the lowest rank, and what the launcher knows: only that, where no rank reported."""

    benchbox_sha256: str  # of the sources
    policy_sha256: str  # of the sources of the policy and of what the policies share
    data_sha256: str | None  # of the metadata of the datasets and of the tokenizer; null where the data name no file
    launcher: str
    set_by_launcher: dict[str, str]  # variables that it set for the ranks
    nodes: list[NodeEnvironment]  # where the launch has several
