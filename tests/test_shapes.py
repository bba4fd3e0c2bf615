"""Shapes and sizes as a person types them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.cli import shapes
from esbench.errors import UserError
from esbench.schema import Case
from impls.benchmark import suites

LIKE = shapes.template(1024, 1, None, 0.02)


def test_shapes_of_the_tables() -> None:
    """A shape that stands in NESgpu's tables is typed as they write it, and is the suite's own case."""
    assert shapes.linear("512x256", LIKE) == suites.linear(512, 256)
    assert shapes.conv2d("64x64x3@32x32", LIKE) == suites.conv2d(64, 64, (3, 3), (32, 32))
    assert shapes.conv2d("1024x1024x1@1x1", LIKE) == suites.conv2d(1024, 1024, (1, 1), (1, 1))


def test_kernel_that_is_not_square() -> None:
    """A second number is the kernel's width."""
    case = shapes.conv2d("8x4x3x5@9x7", LIKE)
    assert (case.kernel_size, case.input_size) == ((3, 5), (9, 7))
    with pytest.raises(UserError, match="a kernel of 3 x 8 is larger than an input of 9 x 7"):
        shapes.conv2d("8x4x3x8@9x7", LIKE)


def test_population_of_a_shape() -> None:
    """Members, repeats, type and sigma come from their own options."""
    like = shapes.template(64, 3, "bfloat16", 0.5)
    expected = Case(
        operator="Linear",
        out_channels=2,
        in_channels=3,
        members=64,
        repeats=3,
        dtype="bfloat16",
        sigma=0.5,
    )
    assert shapes.linear("2x3", like) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2e9),
        ("2 gb", None),
        ("500MB", 5e8),
        ("1.5GiB", 1.5 * 2**30),
        ("10 kB", 1e4),
        ("7", 7),
        ("-1GB", None),
        ("0", None),
        ("GB", None),
        ("9" * 400, None),
    ],
)
def test_sizes(text: str, size: float | None) -> None:
    """A size has a decimal or a binary unit; what is none is refused."""
    if size is None:
        with pytest.raises(UserError, match="expected a size above 0"):
            shapes.memory(text)
    else:
        assert shapes.memory(text) == size


@given(st.text(alphabet="0123456789x@-. ", max_size=20))
def test_whatever_is_typed_is_a_shape_or_one_line(text: str) -> None:
    """No text ends in anything but a case of positive sizes or a message of one line."""
    for read in (shapes.linear, shapes.conv2d):
        case, message = parsed(read, text)
        assert "\n" not in message
        if case:
            assert min(case.out_channels, case.in_channels, *case.kernel_size, *case.input_size) >= 1


def parsed(read: Callable[[str, Case], Case], text: str) -> tuple[Case | None, str]:
    """The case that a text stands for, or what is said of it."""
    try:
        return read(text, LIKE), ""
    except UserError as error:
        return None, str(error)
