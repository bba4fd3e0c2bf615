"""A stored run as other tools read it: pytest-benchmark, github-action-benchmark, bencher, a spreadsheet.

Pure functions of the run: nothing of the machine that exports it is in what they return.
"""

from collections.abc import Callable
from typing import NamedTuple

from esbench.errors import UserError
from esbench.report.export import action, benchmarks, spreadsheet
from esbench.report.export.rows import Chosen, Rows
from esbench.schema import Run

FORMATS: dict[str, Callable[[Run, Rows], Chosen]] = {
    "pytest-benchmark": benchmarks.document,
    "github-action": action.entries,
    "csv": spreadsheet.lines,
}
"""Format -> what writes a run in it."""


class Export(NamedTuple):
    """A run in a format, and in words what of it is there and what was left out."""

    content: bytes
    summary: str


def export(run: Run, form: str) -> Export:
    """Write a run in a format.

    Raises:
        UserError: there is no such format.

    """
    if form not in FORMATS:
        message = f"no format {form!r}; there are: {', '.join(FORMATS)}"
        raise UserError(message)
    rows = Rows(run)
    chosen = FORMATS[form](run, rows)
    return Export(chosen.text.encode(), rows.summary(chosen))
