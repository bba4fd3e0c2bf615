"""The gate on real revisions: ``python -m tests.gate_trial [--times 10] [--planted 3] [--results results]``.

In a clone of what is committed here, this revision is gated against itself, over and over, and then against
one that waits for 3 % of the time of one cell, what asking the clock costs included. Each judgement is kept
in ``<results>/<device>/gate/trials/``, what was planted in ``planted.json``. Ends with 1 where this revision
fails against itself, where another cell is named than the planted one, or where most gates miss that one.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from esbench.gate.proceedings import EVIDENCE
from esbench.gate.records import Decision, Line, Replicate

ROOT = Path(__file__).resolve().parents[1]
CELL = "FlippedSignLinear | Linear(64, 64) members=64 | forward | host"
SCHEME = Path("impls/schemes/flipped.py")
SHARE = 0.03
WAIT = """
        end = time.perf_counter_ns() + {nanoseconds}
        while time.perf_counter_ns() < end:
            pass
"""
SPIN = f"""
    @override
    def correction(self, op: AbstractOperator, noise: FlippedNoise, x: Tensor) -> Tensor:
        if x.dim() > 4:
            return super().correction(op, noise, x)
{WAIT}
        return super().correction(op, noise, x)
"""
"""What is planted: a wait of known length, on layers without space alone."""
WAITS = 2001
"""So often a wait is timed to learn how long it really takes."""


def main(arguments: Sequence[str]) -> int:
    """Try; return the exit code."""
    parser = argparse.ArgumentParser(prog="tests.gate_trial", description=__doc__)
    parser.add_argument("--times", type=int, default=10, help="how often it is gated against itself")
    parser.add_argument("--planted", type=int, default=3, help="how often against what is slower")
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
        planted_ns = SHARE * _launch_ns(clone / "reports/gate" / EVIDENCE)
        wait_ns = waiting(planted_ns)
        _plant(clone, wait_ns)
        found = 0
        for turn in range(1, asked.planted + 1):
            judgement = _gated(clone, "HEAD~1", asked.variants, asked.results)
            failed = sorted(one.cell for one in judgement.verdicts if one.status == "FAIL")
            found += failed == [CELL]
            good &= judgement.exit_code != 2 and set(failed) <= {CELL}
            _keep(asked.results, judgement, {"planted_ns": planted_ns, "wait_ns": wait_ns, "share": SHARE})
            print(  # noqa: T201  # a program of its own
                f"with {planted_ns:.0f} ns planted, {turn} of {asked.planted}: exit code "
                f"{judgement.exit_code}, failed: {failed}",
                flush=True,
            )
    return 0 if good and 2 * found >= asked.planted else 1


def waiting(planted_ns: float) -> int:
    """Return how long is to be waited so that a wait takes so long, with the clock that it looks at.

    A clock may take a tenth of what is planted to answer, and is asked twice at least.
    """
    return max(0, round(2 * planted_ns - _waited_ns(round(planted_ns))))


def _waited_ns(nanoseconds: int) -> float:
    """Return how long a wait takes, all of it."""
    body = textwrap.dedent(WAIT.format(nanoseconds=nanoseconds))
    code, names, taken = compile(body, "wait", "exec"), {"time": time}, []
    for _ in range(WAITS):
        start = time.perf_counter_ns()
        exec(code, names)  # noqa: S102  # the very lines that are planted
        taken.append(time.perf_counter_ns() - start)
    empty = compile("pass", "nothing", "exec")
    idle = []
    for _ in range(WAITS):
        start = time.perf_counter_ns()
        exec(empty, names)  # noqa: S102  # as above, without them
        idle.append(time.perf_counter_ns() - start)
    return median(taken) - median(idle)


def _keep(results: Path, judgement: Decision, planted: dict[str, float]) -> None:
    """Write beside the judgements what was planted for this one."""
    path = results / judgement.opening.environment.slug / "gate" / "trials" / "planted.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**known, judgement.gate_id: planted}, indent=1) + "\n", encoding="utf-8")


def _gated(clone: Path, base: str, variants: Sequence[str], results: Path) -> Decision:
    """Gate the clone's tip; keep and return the judgement."""
    options = [word for glob in variants for word in ("--variants", glob)]
    command = [sys.executable, "-m", "esbench", "gate", "--device", "cpu", "--base", base, *options]
    subprocess.run(command, cwd=clone, check=False, stdout=subprocess.DEVNULL)
    path = clone / "reports/gate/gate.json"
    judgement = msgspec.json.decode(path.read_bytes(), type=Decision)
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
    text = scheme.read_text(encoding="utf-8").replace("import math\n", "import math\nimport time\n", 1)
    place = text.index("class FlippedSign(")
    place = text.index("\n    FOURTH", place) if "\n    FOURTH" in text[place:] else len(text)
    spin = SPIN.replace("{nanoseconds}", str(nanoseconds))
    scheme.write_text(text[:place] + spin + text[place:], encoding="utf-8")
    _run("git", "-C", str(clone), "checkout", "--quiet", "-b", "slower")
    author = ("-c", "user.name=trial", "-c", "user.email=trial@localhost")
    _run("git", "-C", str(clone), *author, "commit", "--quiet", "-am", "slower by 3 % in one cell")


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
