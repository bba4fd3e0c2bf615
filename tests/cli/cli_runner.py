"""Functions that run the command line in this process."""

import sys

import pytest

from esbench.cli import main


def run(*arguments: str) -> int:
    """Run ``esbench`` with these arguments; return its exit code."""
    before, sys.argv = sys.argv, ["esbench", *arguments]
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.argv = before
    return 0


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with 2 and print nothing but one line on stderr; return the line."""
    assert run(*arguments) == 2, arguments
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("esbench: ")
    assert captured.err.count("\n") == 1
    return captured.err
