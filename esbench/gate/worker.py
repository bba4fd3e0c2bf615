"""The worker of the gate measures both revisions: ``python -m esbench.gate.worker ORDERS MESSAGES``.

The variants come from the folders of the revisions; both use the installed harness. The worker imports both,
or starts a process for each of them, which visits its arm when the worker tells it to. One file has the
orders; messages are appended to the other, one a line. The worker ends when stdin is closed.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from esbench.errors import UserError
from esbench.gate.arm import ArmRunner, Send, loaded
from esbench.gate.records import ARMS, Arm, Begin, End, Message, Orders, Replicate
from esbench.measure.failure import classify

WARM_CALLS = 3
"""Calls after a set-up that are not timed."""
CALLS = 3
"""Calls of a visit. Many short visits are better than a few long ones, because a disturbance is long."""
MIN_ROUNDS, MAX_ROUNDS = 6, 10
ROUNDS_S = 0.03
"""Seconds for the rounds of a replicate, within these bounds. With more rounds, the addresses of a set-up
would decide."""


class ArmProcess:
    """A process that has loaded one arm only. Its methods are those of :class:`ArmRunner`.

    If it fails, it sends the reason to the gate, which ends the worker.
    """

    def __init__(self, arm: Arm, orders: Orders, messages: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=serve, args=(arm, orders, messages, other_end), daemon=True)
        self._process.start()
        other_end.close()  # only the process has it, so that its death closes the connection
        self._arm = arm

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._call, method)

    def _call(self, method: str, *arguments: object) -> object:
        try:
            self._connection.send((method, arguments))
            return self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise UserError(f"the process of {self._arm} ended with exit code {code}") from error


def serve(arm: Arm, orders: Orders, messages: Path, connection: Connection) -> None:
    """Load one arm, and call its methods for a worker until that ends."""
    with sending(messages) as send, loaded(orders, (arm,), send) as runners, contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(runners[arm], method)(*arguments))


def time(orders: Orders, arms: Mapping[Arm, ArmRunner | ArmProcess], send: Send) -> None:
    """Send replicates of all cells and controls: each is set up anew, in random order."""
    rng = random.Random(f"{orders.seed} {orders.look} {orders.process}")  # noqa: S311  # an order, not a secret
    names = [name for _ in range(orders.replicates) for name in rng.sample(orders.names, len(orders.names))]
    for done, name in enumerate(names):
        send(Begin(f"the timing of {name}", done, len(names)))
        order = rng.sample(ARMS, 2)
        for arm in order:
            arms[arm].set_up(name, rng.random())
        slowest_ns = max(min(arms[arm].visit(WARM_CALLS)) for arm in order)
        rounds = int(ROUNDS_S * 1e9 / (4 * CALLS * slowest_ns))
        visits: dict[Arm, list[tuple[float, ...]]] = {arm: [] for arm in ARMS}
        first_arms = []
        for _ in range(min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)):
            first, second = rng.sample(ARMS, 2)
            first_arms.append(first)
            for arm in (first, second, second, first):  # a steady drift cancels
                visits[arm].append(arms[arm].visit(CALLS))
        for arm in order:
            arms[arm].finish()
        base, head = (tuple(visits[arm]) for arm in ARMS)
        send(Replicate(orders.look, orders.process, name, tuple(first_arms), base, head))


@contextlib.contextmanager
def sending(messages: Path) -> Iterator[Send]:
    """Yield a function that appends messages to a file; an exception becomes the message of the end."""
    with messages.open("ab", buffering=0) as file:

        def send(message: Message) -> None:
            file.write(msgspec.json.encode(message) + b"\n")

        try:
            yield send
        except UserError as error:
            send(End(str(error)))
        except BaseException as error:  # noqa: BLE001  # packages and variants may raise anything
            send(End(classify(error).reason))


def main(orders: Orders, messages: Path) -> None:
    """Load both revisions, and send what the orders ask for; the last message is the end."""
    order = random.Random(f"{orders.seed} {orders.look} {orders.process} order").sample(ARMS, 2)  # noqa: S311  # no secret
    with sending(messages) as send, contextlib.ExitStack() as stack:
        arms: Mapping[Arm, ArmRunner | ArmProcess]
        if orders.separate:
            arms = {arm: ArmProcess(arm, orders, messages) for arm in order}
            for arm in order:
                arms[arm].wait()
        else:
            arms = stack.enter_context(loaded(orders, order, send))
        if orders.replicates:
            time(orders, arms, send)
        else:
            errors = [arms[arm].survey() for arm in ARMS]
            if all(errors):
                raise UserError(errors[-1])
        send(End())


def _end_with_gate() -> None:
    """End this process and those that it started when the gate closes stdin, also because it is killed."""
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_gate, daemon=True).start()
    main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Orders), Path(sys.argv[2]))
