"""Reading runs: tables, plots and pages are pure functions of what the store holds. No torch."""

from esbench.report.pages import console_tables, render_reports

__all__ = ["console_tables", "render_reports"]
