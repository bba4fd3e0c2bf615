"""Shapes and sizes in the options of ``recommend``."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esbench.cli.recommend import conv2d_case, linear_case, size_bytes, template_case
from esbench.errors import UserError
from esbench.schema import Case
from impls.benchmark import suites

LIKE = template_case(1024, 1, None, 0.02)


def test_a_shape_is_the_case_of_the_suites() -> None:
    """Members, repeats, dtype and sigma are separate options; a kernel may have two sizes."""
    assert linear_case("512x256", LIKE) == suites.linear(512, 256)
    assert conv2d_case("64x64x3@32x32", LIKE) == suites.conv2d(64, 64, (3, 3), (32, 32))
    case = conv2d_case("8x4x3x5@9x7", LIKE)
    assert (case.kernel_size, case.input_size) == ((3, 5), (9, 7))
    with pytest.raises(UserError, match="a kernel of 3 x 8 is larger than an input of 9 x 7"):
        conv2d_case("8x4x3x8@9x7", LIKE)
    numbers = {"members": 64, "repeats": 3, "sigma": 0.5}
    expected = Case(operator="Linear", out_channels=2, in_channels=3, dtype="bfloat16", **numbers)  # type: ignore[arg-type]  # by name
    assert linear_case("2x3", template_case(64, 3, "bfloat16", 0.5)) == expected


def test_a_size_has_a_decimal_unit() -> None:
    """Sizes have decimal units such as GB; any other unit is refused."""
    for text, size in (("2GB", 2e9), ("500MB", 5e8), ("1.5 T", 1.5e12), ("10 kB", 1e4), ("7", 7)):
        assert size_bytes(text) == size
    for text in ("2 gb", "1GiB", "-1GB", "0", "GB", "9" * 400):
        with pytest.raises(UserError, match="expected a size above 0"):
            size_bytes(text)


@given(st.text(alphabet="0123456789x@-. ", max_size=20))
def test_any_text_is_a_shape_or_an_error_of_one_line(text: str) -> None:
    """A text that parses is a case with positive sizes."""
    for parse in (linear_case, conv2d_case):
        case, message = parsed(parse, text)
        assert "\n" not in message
        if case:
            assert min(case.out_channels, case.in_channels, *case.kernel_size, *case.input_size) >= 1


def parsed(parse: Callable[[str, Case], Case], text: str) -> tuple[Case | None, str]:
    """Return the case, or the error."""
    try:
        return parse(text, LIKE), ""
    except UserError as error:
        return None, str(error)
