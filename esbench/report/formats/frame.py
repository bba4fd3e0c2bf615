"""Stored runs as a pandas DataFrame."""

import warnings
from pathlib import Path

import msgspec
import pandas as pd

from esbench.errors import UserError
from esbench.report.analysis.comparison import usable_rows
from esbench.report.formats.exporters import CSV_COLUMNS, csv_line
from esbench.schema import Case, Row, Run
from esbench.store import read_run, run_files, summarize_problems

_COLUMNS = (
    *("run", "device", "operator", "shape", "members", "repeats", "dtype", "scheme", "options"),
    *("phase", "metric", "method", "unit"),
    *CSV_COLUMNS[CSV_COLUMNS.index("median") :],
    *("variant", "case", "mode"),
    *(name for name in Case.__struct_fields__ if name not in {"operator", "members", "repeats", "dtype"}),
)


def read_frame(path: Path) -> pd.DataFrame:
    """Return the values of a run's file, or of all runs below a folder; see :func:`esbench.load`.

    Raises:
        UserError: there is no run.
    """
    # The folder may also be that of one device, whose files are directly inside.
    in_folder = (file for folder in (path, path.parent) for file in run_files(folder))
    files = [path] if path.is_file() else dict.fromkeys(file for file in in_folder if path in file.parents)
    read = [read_run(file) for file in files]
    runs = [run for run, _ in read if run]
    texts = summarize_problems(problem for _, problems in read for problem in problems)
    if not runs:
        raise UserError("; ".join(texts) or f"no runs in {path}: measure with `esbench run`")
    for text in texts:
        warnings.warn(text, stacklevel=3)
    lines = [_line(run, row) for run in runs for row in usable_rows(run)[0]]
    return pd.DataFrame(lines, columns=list(_COLUMNS))


def _line(run: Run, row: Row) -> dict[str, object]:
    return {
        **msgspec.structs.asdict(row.case),
        "shape": row.case.shape,
        "scheme": row.variant.scheme,
        "options": row.variant.name.removeprefix(row.variant.scheme)[1:-1],
        "mode": row.variant.mode,
        **csv_line(run, row),
    }
