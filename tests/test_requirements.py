"""Measuring works without the packages that only reports need."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOR_REPORTS = ("PIL", "cogapp", "matplotlib", "pandas", "ruptures", "scipy", "sklearn", "tabulate")

PROGRAM = f"""
import sys

class Without:
    finders = list(sys.meta_path)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {FOR_REPORTS!r}:
            return None
        return next(filter(None, (one.find_spec(name, path, target) for one in self.finders)), None)

sys.meta_path[:] = [Without()]
from esbench.cli import main
main()
"""


def esbench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line where these packages are missing."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_doctor_needs_no_package_for_reports() -> None:
    """It looks at this machine all the same."""
    done = esbench("doctor")
    assert "CPU timing: " in done.stdout
    assert "Traceback" not in done.stderr


def test_a_run_needs_no_package_for_reports(tmp_path: Path) -> None:
    """The run is stored and succeeds; in place of its tables one line says which package is missing."""
    asked = ("--suite", "gate", "--device", "cpu", "--cases", "Linear*", "--phases", "forward")
    done = esbench("run", *asked, "--variants", "LowRank(rank=1)", "--out", str(tmp_path))
    assert done.returncode in {0, 3}, done.stderr  # 3: the machine was too busy for figures
    assert "3 cells measured" in done.stderr
    assert "no tables are printed: the package pandas is not installed\n" in done.stderr
    assert list(tmp_path.glob("*/*.jsonl"))
