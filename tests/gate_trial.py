"""The gate on real revisions: ``python -m tests.gate_trial [--times 10] [--results results]``.

In a clone of what is committed here, this revision is gated against itself, over and over, and then against
one that spins for 3 % of the time of one cell. Each judgement is kept in ``<results>/<device>/gate/trials/``.
Ends with 1 where one of them is not what it must be.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from esbench.gate.proceedings import EVIDENCE
from esbench.gate.records import Judgement, Line, Replicate

ROOT = Path(__file__).resolve().parents[1]
CELL = "FlippedSignLinear | Linear(64, 64) members=64 | forward | host"
SCHEME = Path("impls/schemes/flipped.py")
SHARE = 0.03
SPIN = """
    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        import time

        end = time.perf_counter_ns() + ({nanoseconds} if x.dim() == 4 else 0)
        while time.perf_counter_ns() < end:
            pass
        return super().correction(op, noise, x)
"""
"""What is planted: a wait of known length, on layers without space alone."""


def main(arguments: Sequence[str]) -> int:
    """Try; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.gate_trial", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="how often it is gated against itself")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder to keep judgements in")
    parser.add_argument("--variants", action="append", default=[], help="glob over variants; repeatable")
    asked = parser.parse_args(arguments)
    good = True
    with tempfile.TemporaryDirectory(prefix="esbench-trial-") as name:
        clone = Path(name) / "clone"
        _run("git", "clone", "--quiet", str(ROOT), str(clone))
        for turn in range(1, asked.times + 1):
            judgement = _gated(clone, "HEAD", asked.variants, asked.results)
            good &= judgement.exit_code == 0
            print(f"against itself, {turn} of {asked.times}: exit code {judgement.exit_code}", flush=True)  # noqa: T201  # a program of its own
        spin_ns = round(SHARE * _launch_ns(clone / "reports/gate" / EVIDENCE))
        _plant(clone, spin_ns)
        judgement = _gated(clone, "HEAD~1", asked.variants, asked.results)
        failed = sorted(one.cell for one in judgement.verdicts if one.status == "FAIL")
        good &= judgement.exit_code == 1 and failed == [CELL]
        print(f"with {spin_ns} ns planted: exit code {judgement.exit_code}, failed: {failed}", flush=True)  # noqa: T201  # a program of its own
    return 0 if good else 1


def _gated(clone: Path, base: str, variants: Sequence[str], results: Path) -> Judgement:
    """Gate the clone's tip; keep and return the judgement."""
    options = [word for glob in variants for word in ("--variants", glob)]
    command = [sys.executable, "-m", "esbench", "gate", "--device", "cpu", "--base", base, *options]
    subprocess.run(command, cwd=clone, check=False, stdout=subprocess.DEVNULL)
    path = clone / "reports/gate/gate.json"
    judgement = msgspec.json.decode(path.read_bytes(), type=Judgement)
    folder = results / judgement.opening.environment.slug / "gate" / "trials"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.move(path, folder / f"{judgement.gate_id}.json")
    return judgement


def _launch_ns(path: Path) -> float:
    """Return how long a launch of the cell takes."""
    lines = (msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines())
    replicates = [line for line in lines if isinstance(line, Replicate)]
    timed = next(one for one in replicates[0].cells if one.cell == CELL)
    return median(sample for visit in timed.base for sample in visit)


def _plant(clone: Path, nanoseconds: int) -> None:
    """Commit the spin on a branch of its own."""
    scheme = clone / SCHEME
    text = scheme.read_text(encoding="utf-8")
    place = text.index("class FlippedSign(")
    place = text.index("\n    FOURTH", place) if "\n    FOURTH" in text[place:] else len(text)
    scheme.write_text(text[:place] + SPIN.format(nanoseconds=nanoseconds) + text[place:], encoding="utf-8")
    _run("git", "-C", str(clone), "checkout", "--quiet", "-b", "slower")
    author = ("-c", "user.name=trial", "-c", "user.email=trial@localhost")
    _run("git", "-C", str(clone), *author, "commit", "--quiet", "-am", "slower by 3 % in one cell")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
