"""What ends a gate early: every signal by which a program is asked to end is one interrupt."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from esbench.cli.options import note

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Those by which a person, a runner or a terminal that closes ends a program."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let every signal to end be an interrupt; once there was one, no other disturbs how this process ends.

    What is ignored stays ignored, as by ``nohup``.
    """
    before = {one: signal.getsignal(one) for one in SIGNALS}
    heeded = {one: handler for one, handler in before.items() if handler not in {signal.SIG_IGN, None}}

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        del signal_number, frame
        for one in heeded:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in heeded:
        signal.signal(one, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted: there is no verdict; workers and work trees are gone")
        raise
    finally:
        for one, handler in heeded.items():
            if signal.getsignal(one) is interrupt:
                signal.signal(one, handler)
