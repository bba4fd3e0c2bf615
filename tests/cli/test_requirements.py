"""Measuring works without packages that only reports need."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOR_REPORTS = ("PIL", "cogapp", "matplotlib", "pandas", "ruptures", "scipy", "sklearn", "tabulate")

PROGRAM = f"""
import sys

class Without:
    finders = list(sys.meta_path)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FOR_REPORTS!r}:
            return None
        return next(filter(None, (finder.find_spec(name, path, target) for finder in self.finders)), None)

sys.meta_path[:] = [Without()]
from esbench.cli import main
from esbench.measure import device_peaks, interleave
device_peaks.MAX_BUFFER["cpu"] = 2**20  # a copy of the usual size takes a second
interleave.MAX_ROUNDS = 3
split = sys.argv.index("--then")
commands = sys.argv[1:split], sys.argv[split + 1 :]
codes = []
for words in commands:
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code or 0)
sys.exit(max(codes))
"""


def test_measuring_needs_no_package_for_reports(tmp_path: Path) -> None:
    """The doctor and a run succeed; one line names the missing package instead of the tables."""
    arguments = ("--suite", "gate", "--device", "cpu", "--cases", "Linear*", "--phases", "forward")
    run = ("run", *arguments, "--variants", "LowRank(rank=1)", "--results", str(tmp_path))
    # The run comes first: as the end of the command line it would start a second process for itself.
    command = [sys.executable, "-c", PROGRAM, *run, "--then", "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "CPU timing: " in done.stdout
    assert "Traceback" not in done.stderr
    assert done.returncode in {0, 3}, done.stderr  # 3: the machine was too busy for figures
    assert "4 measured" in done.stderr
    missing = re.search(
        r"^no tables are printed: the package (\w+) is not installed$", done.stderr, re.MULTILINE
    )
    assert missing
    assert missing[1] in FOR_REPORTS
    assert list(tmp_path.glob("*/*.jsonl"))
