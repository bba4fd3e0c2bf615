"""``python -m esbench``: the same as the command ``esbench``."""

from esbench.cli import main

main()
