"""Tables of the runs that a report shows, and of those it leaves out, with reasons."""

from esbench.report.analysis.run_selection import SHOWN, RunSelection, StoredRun
from esbench.report.tables.table import Block, Cell, Section, Table
from esbench.report.text import one_line
from esbench.schema import Run

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
    """A table of the runs that are shown, and one of those that are not."""
    shown = [one for one in found.stored if one.status == SHOWN]
    others = [one for one in found.stored if one.status != SHOWN]
    newest = sorted(others, key=lambda one: one.path.name, reverse=True)[:LISTED]
    unlisted = len(others) - len(newest)
    more = f" The newest {LISTED}: {unlisted} more are not listed." if unlisted else ""
    blocks = (
        ("Shown", ": in the tables and plots of their pages.", "page", shown),
        (
            "Left out",
            f": only in the tables and plots of a device's history.{more}",
            "why",
            newest,
        ),
    )
    return [
        Section(
            title=f"{len(shown)} of {len(found.stored)} runs are shown",
            origin=_ORIGIN,
            conditions="",
            blocks=tuple(
                Block(title, note, _table(last, stored)) for title, note, last, stored in blocks if stored
            ),
            footnotes=(),
        )
    ]


def _table(last: str, stored: list[StoredRun]) -> Table:
    return Table(
        corner="run",
        headings=(*_COLUMNS, last),
        labels=tuple(one.run.header.run_id if one.run else "-" for one in stored),
        cells=tuple(
            tuple(Cell(one_line(words)) for words in (*_facts(one), _last(last, one))) for one in stored
        ),
    )


def _last(last: str, one: StoredRun) -> str:
    if last == "why":
        return f"{one.status}: {one.reason}" if one.reason else one.status
    page = "/".join(one.page.parts[-2:]) if one.page else ""
    return f"{page}, {one.reason}" if one.reason else page


def _facts(one: StoredRun) -> tuple[str, ...]:
    place = "/".join(one.path.parts[-2:])
    return (place, *(_of(one.run) if one.run else ("", "", "", "", "")))


def _of(run: Run) -> tuple[str, ...]:
    header = run.header
    here = header.environment
    commit = (here.commit or "unknown")[:7] + (" and changes" if here.dirty else "")
    return here.device_name, header.suite, header.started[:10], commit, str(header.schema)
