"""What a person opens: the tables of a run on the terminal, and the folder of reports."""

from esbench.records import Run
from esbench.report import captions, tables


def console_tables(run: Run) -> str:
    """Every table of a run, as text for a terminal."""
    parts = [captions.origin(run), *(section.text() for section in tables.all_sections(run))]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
