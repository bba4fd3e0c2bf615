"""Small runs whose tables are stored as golden files; `python -m tests.report.golden_tables` writes them.

These texts are what users and papers show, so look at every change before it is committed. ``examples.md``
has an example for each rule of the tables, under a heading that states the rule.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from esbench.report.formats import FORMATS, Page, Style
from esbench.report.formats.exporters import export
from esbench.report.tables.measured import other_sections, time_sections
from esbench.report.tables.ranking import ranking_sections
from esbench.schema import Measurement, Row, Run, Variant
from tests import synthetic
from tests.report import ranking_cases
from tests.report.table_examples import examples
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, failed, linear, skipped, time_row, variant

FOLDER = Path(__file__).parent / "golden"
SMALL, LARGE = linear(64, members=8), linear(128, members=8)
NAMES = {
    "markup": "<script>alert(1)</script> [a](javascript:b) **c** `d` ![e](f) # g",
    "latex": r"\input{/etc/passwd} $x$ 50% a_b^c ~ {\bf d} & \\ # <e>",
    "quotes": "\"double\" 'single' |pipe| a\tb\nc\r\u202ed",
    "emoji": "🚀 naïve Ångström ± 5 µs → 10⁻³",
    "formula": "=HYPERLINK(A1)",
    "long": "x" * 200,
}
FORMULAS = ("=cmd|' /C calc'!A0", '"quoted", and | piped', "line\nbreak\r\nand\ttab", "rocket 🚀", "-1", "")
"""Names that a scheme of a foreign file may have, some of them formulas of a spreadsheet."""


def odd(**options: str) -> Measurement:
    """Return a time of a variant with an awkward name."""
    return time_row(Variant(scheme="Odd", options=tuple(options.items())), SMALL, 2.0, 4.0)


def run() -> Run:
    """Return a run with awkward names, and rows that failed, were skipped, are missing or have no numbers."""
    rounds = [1.0, 1.1, 1.2, 1.0, 0.9, 1.1, 1.0, 1.05]
    wrong = failed(variant("Wrong"), SMALL, "forward is off by 3 | <b>a</b>")
    nothing = msgspec.structs.replace(time_row(variant("Empty"), SMALL, 1.0), samples=())
    rows: list[Row] = [
        time_row(BASE, SMALL, *rounds),
        time_row(BASE, LARGE, *rounds),
        time_row(NAIVE, SMALL, *(50 * ms for ms in rounds)),
        time_row(DENSE, SMALL, *(3 * ms for ms in rounds)),
        skipped(DENSE, LARGE, "out of memory: needs 12.5 GB, 2.1 GB are free"),
        time_row(variant("NaN"), SMALL, math.nan),
        time_row(variant("Infinite"), SMALL, math.inf, 1.0),
        wrong,
        time_row(variant("Wrong"), SMALL, 1.0),
        nothing,
        *(odd(note=words) for words in NAMES.values()),
        *(bytes_row(v, SMALL, "peak_bytes", count) for v, count in ((BASE, 4096), (DENSE, 123456789))),
    ]
    return synthetic.run(rows, suite="quick <i>", run_id="20260101T000000Z-quick-0001")


def exported() -> Run:
    """Return a GPU run to export: methods, units, a baseline twice, quality, reasons, names like formulas."""
    case = linear(128, members=256)
    kappa = time_row(DENSE, case, phase="quality", metric="kappa", method="linear fitness")
    labeled = msgspec.structs.replace(time_row(DENSE, case, 1, 3, method="eager"), labels=("dispatch-bound",))
    rows: list[Row] = [
        labeled,
        *(
            time_row(DENSE, case, 1, 3, method="eager", metric=metric)
            for metric in ("warm_latency_ns", "host_latency_ns")
        ),
        time_row(DENSE, case, 1, 2, 3, 4, 5, 6, method="graph"),
        *(bytes_row(DENSE, case, metric, count) for metric, count in (("peak_bytes", 4096), ("launches", 3))),
        *(time_row(BASE, case, ms, ms, method="eager", group=group) for group, ms in ((0, 0.5), (1, 5.0))),
        msgspec.structs.replace(kappa, samples=((-0.5, 0.25, 0.5, 0.75, 1.0, 1.25),)),
        *[skipped(NAIVE, case, "draws no noise", "sample")] * 2,
        skipped(DENSE, linear(512), "=1: out of memory, in vain"),
        time_row(variant("Roundless"), case),
        time_row(variant("Wrong"), case, 7.0, 7.0),
        failed(variant("Wrong"), case, "wrong result: wrong"),
        *(time_row(variant(text), case, 1.0) for text in FORMULAS),
    ]
    return synthetic.run(rows, run_id="=cmd()", device_name='"GPU", 🚀', invalid=("other processes",))


def ranked() -> Run:
    """Return a run whose variants are ranked, one of them exact, one without memory."""
    case = linear(64, members=4096)
    run = ranking_cases.run([*ranking_cases.rows(case), *ranking_cases.orthogonal(case)])
    sources = {"Perturbed": "NESgpu; Salimans et al. 2017, arXiv:1703.03864", "Flipped": "arXiv:1803.04386"}
    return synthetic.changed(run, sources=sources)


def page() -> Page:
    """Return all tables on one page."""
    first, second = run(), ranked()
    sections = [*time_sections(first, "Linear"), *other_sections(first, "Linear")]
    sections += ranking_sections(second, "Linear")
    return Page(Path("tables"), "test-cpu-quick", 'Test "CPU" <b>: suite | quick', [first, second], sections)


@cache
def texts() -> dict[str, str]:
    """Return the golden files by name."""
    files = {}
    for form, (suffix, write) in FORMATS.items():
        files[f"tables{suffix}"] = write(page(), Style(form))
    files["intervals.md"] = FORMATS["markdown"][1](page(), Style(intervals=True))
    files["tables.txt"] = "\n".join(section.text() for section in page().sections)
    files["export.csv"] = export(exported(), "csv").text
    files["export.json"] = export(exported(), "github-action").text
    files["examples.md"] = "\n".join(f"# {rule}\n\n{text}" for rule, text in examples())
    return files


def main(say: Callable[[str], object] = print) -> None:
    """Write the golden files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8", newline="\n")
        say(name)


if __name__ == "__main__":
    main()
