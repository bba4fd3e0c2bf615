"""The study of ways to flush the cache, as a dry run on a CPU."""

import re

import pytest
import torch

from esbench.measure.cuda import CacheBuffer
from esbench.studies import cache_flush


def test_each_call_is_timed_after_each_way_of_flushing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has nine lines: three calls, three ways of flushing, each with its ratio to the first way.

    Without a GPU the error says what to do; the study never falls back to the CPU unasked.
    """
    cache_flush.main(["--device", "cpu", "--seconds", "0.02"])
    title, *lines = capsys.readouterr().out.splitlines()
    assert "a dry run" in title
    pattern = r".{22}(write|write, read|read) +[\d.]+ us  ratio ([\d.]+)  \d+ rounds"
    found = [re.fullmatch(pattern, line) for line in lines]
    assert [match and match[1] for match in found] == [*cache_flush.WAYS] * 3
    assert [match[2] for match in found[::3] if match] == ["1.000"] * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        cache_flush.main([])
    assert "--device cpu" in capsys.readouterr().err


def test_the_steps_of_a_flush_precede_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps run in the listed order before each call and are not timed."""
    log: list[str] = []
    for step in ("write", "read"):
        monkeypatch.setattr(CacheBuffer, step, lambda _, step=step: log.append(step))
    ways = {"write, read": (CacheBuffer.write, CacheBuffer.read)}
    monkeypatch.setattr(cache_flush, "WAYS", ways)
    clock = cache_flush._FlushedHostClock("write, read")  # noqa: SLF001  # the clock of a dry run
    log.clear()
    clock.visit(lambda: log.append("call"), 2)
    assert log == ["write", "read", "call"] * 2
