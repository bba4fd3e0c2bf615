"""Tables of invented runs, for tests of what they show."""

import pandas as pd

from esbench.report.tables.measured import time_sections
from esbench.report.tables.table import Section
from esbench.schema import Row
from tests import synthetic
from tests.synthetic import linear, variant

SMALL, LARGE = linear(256), linear(512)


SPARSE = variant("SparsePerturbed", k=2)


def forward(*rows: Row) -> Section:
    """The one section of a run's forward."""
    (section,) = time_sections(synthetic.run(rows), "Linear", "forward")
    return section


def frames(section: Section) -> dict[str, pd.DataFrame]:
    """The blocks by their titles."""
    return {block.title: block.frame for block in section.blocks}
