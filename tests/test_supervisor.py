"""A run under its supervisor: crashes and hangs cost their variant its rows, and nothing else."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from esbench import store, supervisor
from esbench.errors import UserError
from esbench.schema import Checkpoint, DevicePeak
from esbench.text import one_line
from tests import synthetic
from tests.fakes import CASE
from tests.gate import gate_plugin
from tests.loop_cases import stored_in

ROOT = Path(__file__).parent.parent
MEMBERS = (8, 16)
VARIANT = synthetic.BASE
PEAK = DevicePeak(kind="copy", dtype="float32", amount=1.0, samples=(1.0,))

PRELUDE = f"""
import os, signal, subprocess, sys, time
from esbench.schema import Case, Variant
from esbench.supervisor import child
child = child()
VARIANT = Variant(scheme="A")
CASE = Case(operator="Linear", out_channels=4, in_channels=4)
def watch(activity="forward"):
    child.watch(VARIANT, CASE, activity)
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
def end(code):
    child.announce(code=code)
    sys.exit(code)
sys.path.insert(0, {str(ROOT)!r})
"""


def run_children(body: str) -> tuple[int, list[str]]:
    """Run a command of a few lines under a supervisor; return its code and what the supervisor said."""
    messages: list[str] = []
    return supervisor.run_children([sys.executable, "-c", PRELUDE + body], messages.append), messages


def at_call(name: str, *body: str) -> str:
    """Return the source of a variant that does this in its 40th call on the smallest case."""
    lines = ("self.calls += 1", "if self.calls > 40 and self.case.members == 8:", *(f"    {x}" for x in body))
    return gate_plugin.variant_with(name, "sum(self, x)", *lines, "return x.sum(dim=0)")


def esbench(folder: Path, command: str, plugin: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a command with the text of a plug-in, in a folder with an empty ``impls``, which loads fast."""
    (folder / "impls").mkdir()
    (folder / "impls" / "__init__.py").touch()
    (folder / "deadly.py").write_text(plugin)
    return subprocess.run(
        [sys.executable, "-m", "esbench", command, "--plugin", "deadly.py", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_variants_that_end_the_process_lose_their_rows_only(tmp_path: Path) -> None:
    """A crash, a kill and a hang are rows with their reasons; every other row is there."""
    late = "the process ended with SIGSEGV during clean-up"
    deadly = {
        at_call("TinyHang", "time.sleep(1000)"): {8: "no progress for 5 s during forward host"},
        gate_plugin.variant_with(
            "TinyLate", "__del__(self)", "self.case.members == 8 and os.kill(os.getpid(), 11)"
        ): {8: late},
        at_call("TinyCancel", "raise asyncio.CancelledError"): {8: "CancelledError"},
        at_call("TinyBase", "class Bad(BaseException):", "    __str__ = lambda _: 1 / 0", "raise Bad"): {
            8: "Bad"
        },
        gate_plugin.variant_with(
            "TinyKill", "ready(self)", "self.case.members == 8 and os.kill(os.getpid(), 9)"
        ): {8: "the process ended with SIGKILL (out of memory?) during set-up"},
    }
    first, last = map(gate_plugin.correct_variant, ("TinyFirst", "TinyLast"))
    plugin = gate_plugin.plugin("import asyncio\n", first, *deadly, last, members=MEMBERS)
    options = ("--suite", "tiny", "--device", "cpu", "--cell-limit", "5", "--results", "results")
    start_s = time.monotonic()
    ended = esbench(tmp_path, "run", plugin, *options)
    took_s = time.monotonic() - start_s
    assert ended.returncode == 1, ended.stderr
    run = stored_in(tmp_path / "results")
    expected = {
        (source.partition("class Tiny")[2].partition("(")[0], members): reason
        for source, reasons in deadly.items()
        for members, reason in reasons.items()
    }
    reasons = {(row.variant.name[4:], row.case.members): row.reason for row in run.skipped}
    # A hang is seen at the next poll, which may come late on a busy machine.
    assert {key: re.sub(r"for \d+ s ", "for 5 s ", reason) for key, reason in reasons.items()} == expected
    times = Counter(
        (row.variant.name[4:], row.case.members) for row in run.measurements if row.metric == "latency_ns"
    )
    names = ("First", "Last", *{name for name, _ in expected})
    others = {(name, members) for name in names for members in MEMBERS} - {*expected}
    assert times == Counter([*others, ("Late", 8)])  # its times had been stored
    assert run.device_peaks
    assert run.end is not None
    assert run.end.status == "failed"
    assert 0.5 * took_s < run.end.wall_s < took_s
    assert run.end.wall_s == pytest.approx(sum(run.end.spent_s.values()))
    assert one_line(ended.stderr).count("the run goes on without it") == 3
    assert ended.stderr.count("rows are stored in") == 1


def test_a_crash_while_no_variant_runs_is_tried_once_more(tmp_path: Path) -> None:
    """A second crash ends the command with a line, also if the crashed variant has a stored row."""
    second = f"flag = {str(tmp_path / 'flag')!r}\nif os.path.exists(flag): end(3)\nopen(flag, 'w').close()\n"
    code, messages = run_children(f"{second}crash()")
    assert code == 3
    assert messages == ["the process ended with SIGSEGV while no variant ran: trying once more"]
    with pytest.raises(
        UserError, match="SIGSEGV while no variant ran, for the second time: leave plug-ins out"
    ):
        run_children("crash()")
    with pytest.raises(UserError, match="for the second time"):
        run_children("watch(); crash()")
    with pytest.raises(UserError, match=r"after the run was stored in a\.jsonl"):
        run_children("child.announce(path='a.jsonl', activity='tables'); crash()")
    assert run_children("end(2)") == (2, [])
    assert run_children("child.announce(code=0); crash()") == (0, [])  # as it exits: the command had ended


def test_a_crash_before_the_first_file_leaves_the_variant_out() -> None:
    """This also holds for a lost device, however the child ends after it."""
    body = "if child.announcement.excluded == (VARIANT,): end(0)\n"
    lost = "child.watch(VARIANT, CASE, 'step', 'the device is lost'); watch('clean-up'); end(2)"
    code, messages = run_children(body + lost)
    assert (code, len(messages)) == (0, 1)
    assert messages[0].endswith(": the device is lost during step; the run goes on without it")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not bind threads")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is only one CPU to bind a thread to")
def test_threads_are_bound_to_cpus_unless_the_device_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of a child run on a CPU each; a single one, or a user's own setting, is left alone."""
    body = """
import torch
torch.ones(1 << 20).exp()
bound = len(os.sched_getaffinity(0)) == 1
child.use_all_cpus()
end(10 * bound + (os.sched_getaffinity(0) == os.sched_getaffinity(os.getppid())))
"""
    for name in supervisor.BOUND_THREADS:
        monkeypatch.delenv(name, raising=False)
    for threads, binding, code in (("2", None, 11), ("1", None, 1), ("2", "false", 1)):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        if binding:
            monkeypatch.setenv("OMP_PROC_BIND", binding)
        assert run_children(body)[0] == code


def test_a_budget_shortens_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading has no limit; a variant has half of the time that is left, but at least some seconds."""
    now_s = time.monotonic()
    loading = supervisor.Announcement(start_s=0.0, announced_s=now_s - 30)
    assert not loading.overdue
    busy = msgspec.structs.replace(loading, variant=VARIANT, case=CASE)
    assert not busy.overdue
    assert msgspec.structs.replace(busy, limit_s=20.0).overdue == "no progress for 20 s"
    assert not msgspec.structs.replace(busy, end_s=now_s + 35).overdue
    late = msgspec.structs.replace(busy, end_s=now_s + 25)
    assert late.overdue == "time budget of the run: no progress for 28 s"
    monkeypatch.setattr(supervisor, "MIN_LIMIT_S", 40.0)
    assert not late.overdue


def is_alive(pid: int) -> bool:
    """Return whether a process runs, zombies aside."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(path: Path) -> str:
    """Wait until a file has a line; return it."""
    for _ in range(3000):
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text().strip()
        time.sleep(0.01)
    raise TimeoutError


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a child of its parent's death")
@pytest.mark.parametrize("how", ["killed", "interrupted", "interrupted twice", "late"])
def test_no_child_outlives_the_supervisor(tmp_path: Path, how: str) -> None:
    """The first Ctrl-C lets the child end in order; a second one or the time limit kills it."""
    pids, done = tmp_path / "pids", tmp_path / "done"
    body = f"""
child.announce(limit_s={0.5 if how == "late" else 100})
def stop(*_):
    if {how == "interrupted"}:
        open({str(done)!r}, "a").write("stored\\n")
        end(130)
    open({str(done)!r}, "a").write("ignored\\n")
signal.signal(signal.SIGINT, stop)
if child.announcement.excluded: end(0)
watch()
other = subprocess.Popen(["sleep", "1000"])
with open({str(pids)!r}, "w") as file: print(os.getpid(), other.pid, file=file)
while True: time.sleep(1)
"""
    command = [sys.executable, "-c", PRELUDE + body]
    code = f"from esbench.supervisor import run_children; raise SystemExit(run_children({command!r}, print))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    child, grandchild = map(int, wait_for(pids).split())
    try:
        if how == "killed":
            process.kill()
        elif how != "late":
            process.send_signal(signal.SIGINT)
            assert wait_for(done) == ("stored" if how == "interrupted" else "ignored")
        if how == "interrupted twice":
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == {"killed": -9, "late": 0}.get(how, 130)
        remaining = {child} if how == "killed" else {child, grandchild}
        end_s = time.monotonic() + 10
        while any(map(is_alive, remaining)):
            assert time.monotonic() < end_s
            time.sleep(0.01)
    finally:
        process.kill()
        for pid in filter(is_alive, (child, grandchild)):
            os.kill(pid, signal.SIGKILL)


def test_the_row_of_a_crash_is_kept_when_the_run_is_resumed(tmp_path: Path) -> None:
    """The row follows the last checkpoint and completes no phase; the device peaks stay."""
    row = synthetic.time_row(VARIANT, CASE, 1)
    for stored in ((), (row, Checkpoint(case=CASE, group=0, phase="forward", wall_s=5.0))):
        with store.Writer(tmp_path / str(len(stored)), synthetic.header()) as writer:
            writer.write(PEAK, *stored, row)
        supervisor.store_crash(writer.path, VARIANT, CASE, "it crashed")
        run = store.read_unfinished(writer.path).run
        assert [row.reason for row in run.skipped] == ["it crashed"]
        assert len(run.measurements) == len(stored) // 2
        assert run.device_peaks == (PEAK,)
        assert (run.checkpoints[-1].group, run.checkpoints[-1].wall_s) == (-1, 5.0 * (len(stored) > 0))


def test_a_variant_that_slows_others_down_is_tried_in_a_second_process(tmp_path: Path) -> None:
    """Only if it does so in both has it a row; a third process goes on without it.

    If another variant does so in the second process, that one goes on: the times of the machine vary.
    """
    count, reason = tmp_path / "count", f"{supervisor.SLOWS_OTHERS} (base took 2x as long)"
    body = f"""
from pathlib import Path
count = Path({str(count)!r})
count.write_text(count.read_text() + "x" if count.exists() else "x")
if len(count.read_text()) < 3:
    child.watch(VARIANT, CASE, "set-up", {reason!r})
    end(2)
end(0)
"""
    code, (suspected, blamed) = run_children(body)
    assert (code, count.read_text()) == (0, "xxx")
    assert suspected == f"A on Linear(4, 4): {reason}: checking once more in a new process"
    assert blamed == f"A on Linear(4, 4): {reason} during set-up; the run goes on without it"

    body = f"""
from msgspec.structs import replace
if child.announcement.suspect is None:
    child.watch(replace(VARIANT, scheme="B"), CASE, "set-up", {reason!r})
    end(2)
end(int(child.watch(VARIANT, CASE, "set-up", {reason!r})))
"""
    code, messages = run_children(body)
    assert (code, messages) == (0, [f"B on Linear(4, 4): {reason}: checking once more in a new process"])


def test_check_goes_on_after_a_scheme_that_ends_the_process(tmp_path: Path) -> None:
    """A scheme that exits with code 0 in its check fails; each other scheme has its line, once."""
    first, last = map(gate_plugin.correct_variant, ("TinyFirst", "TinyLast"))
    exiting = gate_plugin.variant_with("TinyExiting", "sum(self, x)", "os._exit(0)")
    checked = 'suite(Suite("check", "", cases=CASES))\n'
    ended = esbench(tmp_path, "check", gate_plugin.plugin(checked, first, exiting, last))
    assert ended.returncode == 1, ended.stderr
    assert "TinyExiting on Tiny(" in ended.stderr
    assert "the process ended with exit code 0 during check" in one_line(ended.stderr)
    lines = [line.split()[0] for line in ended.stdout.splitlines() if "correct: " in line or "failed" in line]
    assert lines == ["TinyFirst", "TinyExiting", "TinyLast"]


def test_a_program_with_the_words_of_a_command_calls_it_in_its_own_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command line that a program calls is not the program, whose last argument may be the same word."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "pytest", "-k", "check"])
    monkeypatch.setattr(sys, "argv", ["esbench", "check"])
    monkeypatch.setattr(supervisor, "run_children", lambda *_: pytest.fail("started the program again"))
    assert not supervisor.supervise(print).is_supervised
