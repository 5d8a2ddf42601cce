"""The measurement of one cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchbox.errors import ConfigurationError
from benchbox.registry.metrics import metric_by_name

if TYPE_CHECKING:
    from benchbox.api.results import Results


class Measurement:
    """Figures of the only cell of a run: the median over its launches, or the worst of a peak; None where unknown."""

    def __init__(self, results: Results) -> None:
        (self._figures,) = results.cells.to_dict("records")
        self.results = results

    def value(self, metric: str) -> float | None:
        """Return a numeric metric by its name, see `benchbox list metrics`.

        Raises:
            ConfigurationError: there is no such metric, or it is a word.
        """
        if not metric_by_name(metric).is_number:
            raise ConfigurationError(f"metric {metric!r} is a word: results.cells[{metric!r}] has it")
        value = self._figures[metric]
        return None if value is None or value != value else float(value)

    @property
    def samples_per_s(self) -> float | None:
        return self.value("global_samples_per_s")

    @property
    def step_time_s(self) -> float | None:
        return self.value("step_time_s")

    @property
    def peak_allocated_bytes(self) -> float | None:
        return self.value("peak_allocated_bytes")

    @property
    def failing(self) -> list[str]:
        """Return the findings of the precision audit that are errors or unknown, each once, with its repair."""
        findings = self.results.findings
        failing = findings[findings["severity"].isin(["error", "unknown"])]
        return sorted({f"{row['code']} {row['title']}: {row['repair']}" for row in failing.to_dict("records")})
