"""A function that runs the command line in this process."""

import sys

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
