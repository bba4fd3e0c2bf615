"""esbench: a benchmark of ways to evaluate a population of perturbed networks on a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"


def load(path: str | Path) -> "pd.DataFrame":
    """Return the values of stored runs as a pandas DataFrame, one row for each.

    A value is the median of a metric for one variant, case, phase and method, in the unit of the column
    ``unit``, with its 95 % interval ``low`` to ``high``. A variant that could not be measured has a row with
    its ``status`` and ``reason`` instead. :func:`esbench.report.formats.frame.read_frame` has all columns.

    Args:
        path: a run's file, or a folder of results.

    Raises:
        UserError: there is no run.
    """
    from esbench.report.formats.frame import read_frame  # noqa: PLC0415  pandas takes a second to import

    return read_frame(Path(path))
