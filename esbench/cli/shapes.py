"""Shapes, sizes and scales as a person types them."""

import math
import re

import msgspec

from esbench.errors import UserError
from esbench.registry import DTYPES
from esbench.schema import Case

_LARGEST = 2**31 - 1
_LINEAR = re.compile(r"(\d+)x(\d+)")
_CONV = re.compile(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?@(\d+)x(\d+)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?")
_PREFIXES = ("", "K", "M", "G", "T")


def template(members: int, repeats: int, dtype: str | None, sigma: float) -> Case:
    """A case without a shape.

    Raises:
        UserError: there is no such type, or a number is out of range.

    """
    if dtype is not None and dtype not in DTYPES:
        message = f"no dtype {dtype!r}; there are: {', '.join(DTYPES)}"
        raise UserError(message)
    if not (math.isfinite(sigma) and sigma > 0):
        message = f"--sigma {sigma:g}: expected a number above 0"
        raise UserError(message)
    for name, value in (("members", members), ("repeats", repeats)):
        if not 1 <= value <= _LARGEST:
            message = f"--{name} {value}: expected a number from 1 to {_LARGEST}"
            raise UserError(message)
    return Case(
        operator="",
        out_channels=1,
        in_channels=1,
        members=members,
        repeats=repeats,
        dtype=dtype or "float32",
        sigma=sigma,
    )


def linear(text: str, like: Case) -> Case:
    """``1024x512`` is a Linear layer with 1024 outputs and 512 inputs.

    Raises:
        UserError: it is no such shape.

    """
    out, inp = _numbers("linear", text, _LINEAR, "OUTxIN, such as 1024x1024")
    return _with(like, operator="Linear", out_channels=out, in_channels=inp)


def conv2d(text: str, like: Case) -> Case:
    """``64x32x3@28x28`` is a Conv2d layer of 64 outputs and 32 inputs, kernel 3, on inputs of 28 x 28.

    A kernel that is not square has two numbers: ``64x32x3x5@28x28``. Without padding, as in the suites.

    Raises:
        UserError: it is no such shape, or the kernel is larger than the input.

    """
    expected = "OUTxINxKERNEL@HEIGHTxWIDTH, such as 64x64x3@32x32"
    out, inp, tall, *rest = _numbers("conv", text, _CONV, expected)
    height, width = rest[-2:]
    wide = rest[0] if len(rest) == 3 else tall  # noqa: PLR2004  # a second number for the kernel
    if tall > height or wide > width:
        message = f"--conv {text}: a kernel of {tall} x {wide} is larger than an input of {height} x {width}"
        raise UserError(message)
    return _with(
        like,
        operator="Conv2d",
        out_channels=out,
        in_channels=inp,
        kernel_size=(tall, wide),
        input_size=(height, width),
    )


def memory(text: str) -> float:
    """``2GB``, ``500 MB`` or ``1.5GiB`` in bytes.

    Raises:
        UserError: it is no size above 0.

    """
    found = _BYTES.fullmatch(text.strip())
    size = float(found[1]) * (1024 if found[3] else 1000) ** _PREFIXES.index(found[2].upper()) if found else 0
    if not 0 < size < math.inf:
        message = f"--memory-limit {text}: expected a size above 0, such as 2GB or 500MB"
        raise UserError(message)
    return size


def _numbers(option: str, text: str, pattern: re.Pattern[str], expected: str) -> list[int]:
    found = pattern.fullmatch(text.strip().lower())
    numbers = [int(number) for number in found.groups() if number is not None] if found else []
    if not numbers or not all(1 <= number <= _LARGEST for number in numbers):
        message = f"--{option} {text}: expected {expected}, each from 1 to {_LARGEST}"
        raise UserError(message)
    return numbers


def _with(like: Case, **fields: object) -> Case:
    return msgspec.structs.replace(like, **fields)
