"""Tables of the runs that a report shows, and of those it leaves out, with reasons."""

from esbench.report.analysis.run_selection import SHOWN, RunSelection, StoredRun
from esbench.report.tables.table import Block, Cell, Section, Table
from esbench.report.text import one_line

NAME = "runs"
TITLE = "The runs of this report"

LISTED = 200
"""The largest number of left-out runs in the table."""
_COLUMNS = ("file", "device", "suite", "date", "commit", "schema")
_ORIGIN = (
    "A page shows the newest run of its suite and device that is complete, valid, covers the whole suite and "
    "was measured at a clean commit; without such a run, the newest one, and its captions say what it lacks. "
    "All samples of all runs are kept in their files."
)


def sections(found: RunSelection) -> list[Section]:
    """Return a table of the runs that are shown, and one of the runs left out."""
    shown = [one for one in found.stored if one.status == SHOWN]
    others = [one for one in found.stored if one.status != SHOWN]
    newest = sorted(others, key=lambda one: one.path.name, reverse=True)[:LISTED]
    unlisted = len(others) - len(newest)
    more = f" The newest {LISTED}: {unlisted} more are not listed." if unlisted else ""
    beside = f": only in the tables and plots of a device's history.{more}"
    blocks = [
        Block("Shown", ": in the tables and plots of their pages.", _table("page", shown)),
        Block("Left out", beside, _table("why", newest)),
    ]
    return [
        Section(
            title=f"{len(shown)} of {len(found.stored)} runs are shown",
            origin=_ORIGIN,
            conditions="",
            blocks=tuple(block for block in blocks if block.table.labels),
            footnotes=(),
        )
    ]


def _table(last: str, stored: list[StoredRun]) -> Table:
    """Return a table of runs; the last column is their page, or why they are left out."""
    return Table(
        corner="run",
        headings=(*_COLUMNS, last),
        labels=tuple(one.run.header.run_id if one.run else "-" for one in stored),
        cells=tuple(tuple(Cell(one_line(text)) for text in _texts(one)) for one in stored),
    )


def _texts(one: StoredRun) -> tuple[str, ...]:
    facts = ("",) * (len(_COLUMNS) - 1)
    if one.run:
        header, here = one.run.header, one.run.header.environment
        commit = (here.commit or "unknown")[:7] + (" and changes" if here.dirty else "")
        facts = (here.device_name, header.suite, header.started[:10], commit, str(header.schema))
    page = "/".join(one.page.parts[-2:]) if one.page else ""
    what, separator = (page, ", ") if one.status == SHOWN else (one.status, ": ")
    return "/".join(one.path.parts[-2:]), *facts, separator.join(filter(None, (what, one.reason)))
