"""Durations, percentages and amounts of memory on the command line."""

import re

from benchbox.errors import ConfigurationError

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as 90s, 30m or 2h, the value of `--budget`.

    Raises:
        ConfigurationError: it is none.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigurationError(f"--budget: {text!r} is no duration; write it as 90s, 30m or 2h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_share(text: str, option: str = "--resolution") -> float:
    """Return the share of a percentage such as 2%.

    Raises:
        ConfigurationError: it is none between 0 and 100%.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text.strip())
    if match is None or not 0 < float(match[1]) < 100:
        raise ConfigurationError(f"{option}: {text!r} is no percentage; write it as 2%")
    return float(match[1]) / 100


def parse_memory(text: str, option: str) -> int:
    """Return the bytes of an amount such as 80GiB, as a matrix writes it.

    Raises:
        ConfigurationError: it is none.
    """
    from benchbox.spec.types import parse_bytes

    amount = parse_bytes(text.strip())
    if amount is None or amount < 1:
        raise ConfigurationError(f"{option}: {text!r} is not an amount of memory; write it as 80GiB, 512MiB or 1.5GB")
    return amount
