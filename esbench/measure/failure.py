"""Failures: the status and reason that a run stores when a variant raises."""

import re
from typing import Literal, NamedTuple

from esbench.errors import UserError, message_of
from esbench.measure.memory import is_out_of_memory
from esbench.schema import OUT_OF_MEMORY, WRONG_RESULT
from esbench.workload import UnavailableError, WrongResultError

ALLOCATION = re.compile(r"tried to allocate [\d.]+ \w+", re.IGNORECASE)
"""The part of torch's out-of-memory message that has the number of bytes."""


class DeviceLostError(UserError):
    """The device stopped responding: finished rows are stored, nothing more can be measured."""


class NotCheckedError(Exception):
    """Nothing was compared with a reference; the message says which check is missing."""


class Failure(NamedTuple):
    """The status and the reason of a row without a number."""

    status: Literal["unavailable", "failed"]
    reason: str


def classify(error: BaseException) -> Failure:
    """Return the status and a one-line reason for an exception.

    The result does not refer to the exception, whose traceback would keep the variant's tensors allocated.

    Raises:
        KeyboardInterrupt: the error is a KeyboardInterrupt, so that callers do not swallow Ctrl-C.
    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = message_of(error)
    if isinstance(error, UnavailableError):
        return Failure("unavailable", text)
    if is_out_of_memory(error):
        allocation = ALLOCATION.search(text)
        detail = allocation.group() if allocation else text or "no details"
        return Failure("unavailable", f"{OUT_OF_MEMORY}: {detail}")
    if isinstance(error, WrongResultError):
        return Failure("failed", f"{WRONG_RESULT}: {text}")
    if isinstance(error, NotCheckedError):
        return Failure("failed", f"not checked: {text}")
    return Failure("failed", f"{type(error).__name__}: {text}" if text else type(error).__name__)
