"""Products with a few columns of noise, and their sums, are those of written-out weights."""

import pytest
import torch
from torch import Tensor

from impls.kernels.sparse import Sorted, column_sums, sorted_columns, sparse_product
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.operands import NARROW, SIZES, SMALL, TYPES, held, normal, output, rows


def chosen(members: int, kept: int, inputs: int) -> Tensor:
    """Draw different columns for each member, [m, k]."""
    return torch.rand(members, inputs, generator=generator(9)).argsort(1)[:, :kept].to(DEVICE)


def written(  # noqa: PLR0913, PLR0917  what a product takes, and its type
    x: Tensor, weight: Tensor, columns: Tensor, values: Tensor, sigma: float | Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply each row by its member's own weight, written out."""
    dense = torch.zeros(*columns.shape[:1], *weight.shape, dtype=dtype, device=DEVICE)
    places = columns.unsqueeze(1).expand(-1, len(weight), -1)
    dense.scatter_(2, places, values.to(dtype).mT)
    scale = torch.as_tensor(sigma, device=DEVICE).to(dtype).expand(len(x)).view(-1, 1, 1, 1)
    noise = torch.einsum("rmpi,moi->rmpo", x.to(dtype), dense)
    return x.to(dtype) @ weight.to(dtype).T + scale * noise


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_product_is_right(dtype: torch.dtype, sizes: tuple[int, ...], kept: int) -> None:
    """It is as near to that in float64 as a slow one is, and touches nothing but its buffers."""
    repeats, members, positions, outputs, inputs = sizes
    columns = chosen(members, kept, inputs)
    weight, values = normal(1, outputs, inputs, dtype=dtype), normal(2, members, kept, outputs, dtype=dtype)
    with canaries() as around:
        x = rows(around, repeats, members, positions, inputs, dtype)
        operands = around.guard(weight), around.guard(columns), around.guard(values)
        y = sparse_product(x, *operands, 0.5, output(around, x, outputs), SMALL)
    held(y, *(written(x, weight, columns, values, 0.5, wider) for wider in (torch.float64, dtype)))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kept", [1, 8])
def test_repeats_may_have_scales_of_their_own(dtype: torch.dtype, kept: int) -> None:
    """A signed scale for each repeat is what its rows' noise is multiplied by, in the default tiles too."""
    columns, values = chosen(4, kept, 20), normal(2, 4, kept, 7, dtype=dtype)
    x, weight = normal(0, 2, 4, 3, 20, dtype=dtype), normal(1, 7, 20, dtype=dtype)
    sigma = torch.tensor([0.3, -0.3], dtype=dtype, device=DEVICE)
    y = sparse_product(x, weight, columns, values, sigma, torch.empty(2, 4, 3, 7, dtype=dtype, device=DEVICE))
    held(y, *(written(x, weight, columns, values, sigma, wider) for wider in (torch.float64, dtype)))


def test_a_scale_is_exact_in_float64() -> None:
    """A kernel's numbers are float32, and yet a scale in float64 has 53 bits."""
    columns, values = chosen(3, 2, 9), normal(2, 3, 2, 5, dtype=torch.float64)
    x, weight = normal(0, 1, 3, 1, 9, dtype=torch.float64), normal(1, 5, 9, dtype=torch.float64)
    y = sparse_product(x, weight, columns, values, 0.1, torch.empty_like(x[..., :5]))
    torch.testing.assert_close(y, written(x, weight, columns, values, 0.1, torch.float64))


def test_the_first_and_the_last_column_count() -> None:
    """Noise at the ends of a row meets the inputs there, and no others."""
    columns = torch.tensor([[0, 32], [32, 0], [31, 1]], device=DEVICE)
    values, x, weight = (
        torch.ones(3, 2, 4, device=DEVICE),
        normal(0, 1, 3, 1, 33),
        torch.zeros(4, 33, device=DEVICE),
    )
    y = sparse_product(x, weight, columns, values, 1.0, torch.empty(1, 3, 1, 4, device=DEVICE))
    expected = x[0, :, 0].gather(1, columns).sum(1, keepdim=True).expand(3, 4)
    torch.testing.assert_close(y[0, :, 0], expected)


SUMS = [(5, 1, 3, 7), (60, 2, 7, 37), (1, 3, 20, 1), (40, 1, 2, 530)]
"""(members, columns of each, inputs, outputs): columns that many members have, and that none has."""


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize(("members", "kept", "inputs", "outputs"), SUMS)
def test_a_sum_is_right(dtype: torch.dtype, members: int, kept: int, inputs: int, outputs: int) -> None:
    """Every column sums what its members have there, and touches nothing but its buffers."""
    columns = chosen(members, kept, inputs)
    values, utilities = normal(0, members, kept, outputs, dtype=dtype), normal(1, members, dtype=dtype)
    sorted_ = sorted_columns(columns, inputs)
    with canaries() as around:
        where = Sorted(around.guard(sorted_.order), around.guard(sorted_.borders))
        found = column_sums(where, around.guard(values), around.guard(utilities))
    held(found, *(summed(columns, values, utilities, inputs, wider) for wider in (torch.float64, dtype)))


def summed(columns: Tensor, values: Tensor, utilities: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Add values up at their columns, one after another."""
    weighted = values.to(dtype) * utilities.to(dtype).view(-1, 1, 1)
    total = torch.zeros(inputs, values.shape[2], dtype=dtype, device=DEVICE)
    return total.index_add_(0, columns.flatten(), weighted.flatten(0, 1))


def test_a_sum_of_float64_is_one() -> None:
    """Values of float64 are summed in float64."""
    columns, values = chosen(30, 2, 5), normal(0, 30, 2, 9, dtype=torch.float64)
    utilities = normal(1, 30, dtype=torch.float64)
    found = column_sums(sorted_columns(columns, 5), values, utilities)
    torch.testing.assert_close(found, summed(columns, values, utilities, 5, torch.float64))


def test_all_members_may_have_one_column() -> None:
    """A column that all have is the sum of all, exactly where float32 is, and the others are 0."""
    columns = torch.full((100, 1), 3, device=DEVICE)
    values, utilities = torch.ones(100, 1, 5, device=DEVICE), torch.arange(100.0, device=DEVICE)
    expected = torch.zeros(6, 5, device=DEVICE)
    expected[3] = utilities.sum()
    assert torch.equal(column_sums(sorted_columns(columns, 6), values, utilities), expected)


def test_a_sum_adds_in_the_order_of_members() -> None:
    """Members of a column stand in their order, whatever the sort: the same bits every time."""
    columns = torch.randint(0, 3, (200, 2), generator=generator(0)).to(DEVICE)
    order, borders = sorted_columns(columns, 3)
    for column in range(3):
        mine = order[borders[column] : borders[column + 1]]
        assert torch.equal(mine, (columns.flatten() == column).nonzero().flatten())


@pytest.mark.parametrize(
    ("columns", "values", "message"),
    [
        (torch.zeros(3, 2).long(), torch.zeros(3, 1, 4), "columns must be"),
        (torch.zeros(2, 1).long(), torch.zeros(2, 1, 4), "columns must be"),
        (torch.zeros(3, 1).long(), torch.zeros(3, 1, 5), "columns must be"),
        (torch.zeros(3, 9).long(), torch.zeros(3, 9, 4), "at most 8"),
        (torch.zeros(3, 1).long(), torch.zeros(3, 1, 4).half(), "type of the rows"),
    ],
)
def test_noise_that_does_not_fit_is_refused(columns: Tensor, values: Tensor, message: str) -> None:
    """Other shapes and types raise, and nothing is launched."""
    x, y = torch.zeros(1, 3, 1, 10), torch.zeros(1, 3, 1, 4)
    with pytest.raises(ValueError, match=message):
        sparse_product(x, torch.zeros(4, 10), columns, values, 1.0, y)


@pytest.mark.parametrize("utilities", [torch.zeros(2), torch.zeros(3).half(), torch.zeros(3, 1)])
def test_utilities_that_do_not_fit_are_refused(utilities: Tensor) -> None:
    """Other lengths and types raise."""
    where = sorted_columns(torch.zeros(3, 1).long(), 4)
    with pytest.raises(ValueError, match="a sum takes"):
        column_sums(where, torch.zeros(3, 1, 5), utilities)
