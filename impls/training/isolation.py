"""Processes that begin with nothing: for settings that are read once, and memory that must come back."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
R = TypeVar("R")


class IsolationError(RuntimeError):
    """A fresh process ended without an answer; the message is the last line that it said."""


def isolated(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a fresh process, which ends with it: what it held then is the system's again.

    Args:
        function: one that can be pickled: of a module, and no lambda.
        args: what it is called with; tensors arrive as copies.
        kwargs: the same, by name.

    Raises:
        Exception: whatever the function raises.

    """
    # A fork would share the parent's threads, and cannot use CUDA once the parent has.
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        found: R = pickle.loads(pool.submit(_pickled, pickle.dumps((function, args, kwargs))).result())  # noqa: S301  our own child's
        return found


def answer(module: str, question: msgspec.Struct, environment: Mapping[str, str], kind: type[R]) -> R:
    """Run a module in a fresh process, hand it a question as JSON and read the last line that it prints.

    Args:
        module: what ``python -m`` runs; it calls :func:`asked` and :func:`reply`.
        question: what can be said in JSON.
        environment: variables beside those of this process.
        kind: what the answer is.

    Raises:
        IsolationError: it ended with an error.

    """
    paths = {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(  # noqa: S603  this interpreter, and a module of this project
        [sys.executable, "-m", module, msgspec.json.encode(question).decode()],
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        message = f"a fresh process for {module} failed: {said[-1]}"
        raise IsolationError(message)
    return msgspec.json.decode(lines[-1], type=kind)


def asked(kind: type[R]) -> R:
    """Read the question that :func:`answer` put to this process."""
    return msgspec.json.decode(sys.argv[1], type=kind)


def reply(found: msgspec.Struct) -> None:
    """Print the answer to :func:`answer`, behind whatever was printed before."""
    sys.stdout.write(f"\n{msgspec.json.encode(found).decode()}\n")


def _pickled(call: bytes) -> bytes:
    # As bytes: torch would hand tensors over in shared memory, for which the child would have to live on.
    function, args, kwargs = pickle.loads(call)  # noqa: S301  what isolated() wrote
    return pickle.dumps(function(*args, **kwargs))
