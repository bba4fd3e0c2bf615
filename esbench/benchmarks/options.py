"""The options of the benchmarks; without torch, so that pytest --help does not import it."""

from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from esbench.benchmarks.session import Front


class Choice(NamedTuple):
    """The options, named as those of `esbench run`."""

    suite: str | None = None
    device: str = "auto"
    variants: tuple[str, ...] = ()
    cases: str = "*"
    phases: str = ""
    plugins: tuple[str, ...] = ()
    seed: int = 0


FRONT: pytest.StashKey["Front"] = pytest.StashKey()
"""Where pytest's configuration keeps what was chosen, and what is set up of it."""
