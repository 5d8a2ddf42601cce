"""A run as data frames."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from benchbox.analysis.best_batches import compare_run
from benchbox.analysis.certificates import certificates
from benchbox.analysis.sequential import criteria_of
from benchbox.analysis.summary import summarize
from benchbox.report.write import read_report
from benchbox.store.run import RunStore
from benchbox.store.table import flatten, launch_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd

    from benchbox.analysis.comparability import Comparison
    from benchbox.analysis.summary import CellSummary
    from benchbox.registry.launch_record import LaunchRecord
    from benchbox.report.view import Report
    from benchbox.store.run import Run

_STEP_COLUMNS = ["cell_id", "launch", "step", "rank", "loss", "grad_norm", "step_time_s"]  # beside the seconds of phases


class Results:
    """A run directory as data frames. In a notebook it shows its table.

    Everything is read once, when it is first asked for; a run that goes on is loaded anew to see more.

    Args:
        path: a run directory, also a published one.

    Raises:
        RecordError: it is none, or a record cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store = RunStore(path)
        self.run: Run = self._store.run()

    @cached_property
    def records(self) -> list[LaunchRecord]:
        """Launch records, as `docs/reference.md` describes them."""
        return list(self._store.records())

    @cached_property
    def cells(self) -> pd.DataFrame:
        """One row per cell, indexed by its id.

        Columns: the fields of the cell, `status`, every metric over launches with `<metric>_low` and `<metric>_high`, and for
        pairs with the reference `ratio`, `ratio_low`, `ratio_high` (throughput), `verdict` and `reason`.
        """
        import pandas as pd

        summaries = summarize(self.run, self.records)
        pairs = compare_run(self.run, summaries, certificates(self.run, summaries), criteria_of(self.run)).cells
        rows = [_cell_row(summary, pairs.get(summary.cell_id)) for summary in summaries]
        return pd.DataFrame(rows, index=pd.Index([summary.cell_id for summary in summaries], name="cell_id"))

    @cached_property
    def launches(self) -> pd.DataFrame:
        """One row per launch, as in `table.parquet`."""
        return launch_table(self.records)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per launch, step and rank: `loss`, `grad_norm`, and of measured steps the seconds of each phase.

        Steps count from 0, at the first warm-up step. `step_time_s` is that rank's; unknown values are missing.
        """
        import pandas as pd

        rows = [row for record in self.records for row in _step_rows(record)]
        return pd.DataFrame(rows, columns=None if rows else _STEP_COLUMNS)

    @cached_property
    def findings(self) -> pd.DataFrame:
        """One row per finding of the precision audit of a launch; `evidence` is JSON."""
        import pandas as pd

        columns = ["cell_id", "launch", "code", "severity", "title", "where", "rank", "cause", "repair", "evidence"]
        rows = [
            {"cell_id": record["cell_id"], "launch": record["launch"], **finding, "evidence": json.dumps(finding["evidence"])}
            for record in self.records
            for finding in (record["precision"] or {"findings": []})["findings"]
        ]
        return pd.DataFrame(rows, columns=columns)

    @cached_property
    def report(self) -> Report:
        """The content of the report, without markup."""
        return read_report(self._store, self.records)

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.report.counts)
        return f"<benchbox run {self.run.name} in {self.path}: {counts}>"

    def _repr_html_(self) -> str:
        """Return the answers, the sentences and the brief columns of the report's table. Input is escaped."""
        table = self.report.table
        shown = [index for index, column in enumerate(table.columns) if column.brief]
        head = Markup("").join(Markup("<th>{}</th>").format(table.columns[index].name) for index in shown)
        body = Markup("").join(
            Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(row[index].line) for index in shown))
            for row in table.rows
        )
        answers = Markup("").join(
            Markup("<p>{}</p>").format(" ".join([f"{box.task}:"] * bool(box.task) + [line.text for line in box.lines]))
            for box in self.report.answers
        )
        sentences = Markup("").join(Markup("<p><b>{}</b></p>").format(text) for text in self.report.headline.sentences)
        return str(
            Markup("<p>{}</p>{}{}<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(
                escape(repr(self)), answers, sentences, head, body
            )
        )


def _cell_row(summary: CellSummary, comparison: Comparison | None) -> dict[str, Any]:
    row: dict[str, Any] = {**flatten(summary.cell), "status": summary.status, "launches": len(summary.ok)}
    for name, spread in summary.values.items():
        values = (None, None, None) if spread is None else (spread.value, spread.low, spread.high)
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
    effect = None if comparison is None else comparison.effect
    row |= {f"ratio{end}": getattr(effect, name, None) for end, name in (("", "ratio"), ("_low", "low"), ("_high", "high"))}
    row |= {name: getattr(comparison, name, None) for name in ("verdict", "reason")}
    return row


def _step_rows(record: LaunchRecord) -> Iterator[dict[str, Any]]:
    times, phases = record["step_time_s"], record["phases_s"] or {}
    losses, norms = record["loss"] or (), record["grad_norm"] or ()
    if times is None:
        return
    warmup = record["warmup_steps"]
    for rank, rank_times in enumerate(times["per_rank"]):
        for step in range(max(len(losses), warmup + len(rank_times))):
            measured = step - warmup
            is_measured = 0 <= measured < len(rank_times)
            yield {
                "cell_id": record["cell_id"],
                "launch": record["launch"],
                "step": step,
                "rank": rank,
                "loss": losses[step] if step < len(losses) else None,
                "grad_norm": norms[step] if step < len(norms) else None,
                "step_time_s": rank_times[measured] if is_measured else None,
                **{
                    f"{phase}_s": values["per_rank"][rank][measured] if is_measured else None
                    for phase, values in phases.items()
                },
            }
