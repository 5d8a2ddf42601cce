"""Reports of a run: a view model without markup, rendered as HTML, Markdown and text; tables as CSV and Parquet."""

from benchbox.report.write import ReportPaths, write_reports

__all__ = ["ReportPaths", "write_reports"]
