"""Failures: the status and reason that a run stores when a variant raises."""

import re
from typing import Literal, NamedTuple

from esbench.errors import UserError, message_of
from esbench.measure.memory import is_out_of_memory
from esbench.schema import OUT_OF_MEMORY
from esbench.workload import UnavailableError, WrongResultError

TRIED = re.compile(r"tried to allocate [\d.]+ \w+", re.IGNORECASE)
"""The part of torch's message with the number of bytes."""


class DeviceLostError(UserError):
    """The device no longer responds: finished rows are stored, nothing more can be measured."""


class Failure(NamedTuple):
    """The status and the reason of a row without a number."""

    status: Literal["unavailable", "failed"]
    reason: str


def classify(error: BaseException) -> Failure:
    """Return the status and a one-line reason of an exception, without a reference to it or its frames.

    Raises:
        KeyboardInterrupt: the error is one, so callers may catch every exception of a variant.

    """
    if isinstance(error, KeyboardInterrupt):
        raise error
    text = message_of(error)
    if isinstance(error, UnavailableError):
        return Failure("unavailable", text)
    if is_out_of_memory(error):
        tried = TRIED.search(text)
        return Failure(
            "unavailable", f"{OUT_OF_MEMORY}: {tried.group() if tried else text or 'nothing left'}"
        )
    if isinstance(error, WrongResultError):
        return Failure("failed", f"oracle: {text}")
    return Failure("failed", f"{type(error).__name__}: {text}" if text else type(error).__name__)
