"""Products of which members drop channels are those of rows or outputs that were multiplied by gates."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from impls.kernels.dropout import dropped_inputs, dropped_outputs
from tests.kernels.launched.canaries import DEVICE, canaries, generator
from tests.kernels.launched.operands import NARROW, SIZES, SMALL, TYPES, held, normal, output, rows

Multiply = Callable[..., Tensor]
either_side = pytest.mark.parametrize("multiply", [dropped_inputs, dropped_outputs])


def masks(multiply: Multiply, members: int, weight: Tensor) -> Tensor:
    """Draw what each member keeps of inputs or outputs, bool."""
    width = weight.shape[1 if multiply is dropped_inputs else 0]
    return (torch.rand(members, width, generator=generator(9)) < 0.6).to(DEVICE)


def written(  # noqa: PLR0913, PLR0917  what a product takes, and its type
    multiply: Multiply,
    x: Tensor,
    weight: Tensor,
    kept: Tensor,
    on: float | Tensor,
    off: float | Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Multiply rows by gates and then by the weight, or the other way round."""
    both = [
        torch.as_tensor(one, device=DEVICE).to(dtype).expand(len(x)).view(-1, 1, 1, 1) for one in (on, off)
    ]
    gates = torch.where(kept.unsqueeze(1), both[0], both[1])
    x, weight = x.to(dtype), weight.to(dtype)
    return (x * gates) @ weight.T if multiply is dropped_inputs else (x @ weight.T) * gates


@either_side
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_product_is_right(multiply: Multiply, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """It is as near to that in float64 as a slow one is, and touches nothing but its buffers."""
    repeats, members, positions, outputs, inputs = sizes
    weight = normal(1, outputs, inputs, dtype=dtype)
    kept = masks(multiply, members, weight)
    with canaries() as around:
        x = rows(around, repeats, members, positions, inputs, dtype)
        gates = around.guard(kept.byte()).view(torch.bool)
        y = multiply(x, around.guard(weight), gates, 2.5, 0.0, output(around, x, outputs), SMALL)
    held(y, *(written(multiply, x, weight, kept, 2.5, 0.0, wider) for wider in (torch.float64, dtype)))


@either_side
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("tiling", [None, SMALL], ids=["default", "small"])
def test_repeats_may_have_gates_of_their_own(multiply: Multiply, dtype: torch.dtype, tiling: None) -> None:
    """What is on and what is off count as much as a repeat says: with the negated noise, off counts more."""
    x, weight = normal(0, 2, 9, 2, 40, dtype=dtype), normal(1, 37, 40, dtype=dtype)
    kept = masks(multiply, 9, weight)
    on, off = torch.tensor([2.5, -0.5]).to(dtype).to(DEVICE), torch.tensor([0.0, 2.0]).to(dtype).to(DEVICE)
    y = multiply(x, weight, kept, on, off, torch.empty(2, 9, 2, 37, dtype=dtype, device=DEVICE), tiling)
    held(y, *(written(multiply, x, weight, kept, on, off, wider) for wider in (torch.float64, dtype)))


@either_side
@pytest.mark.parametrize("off", [0.0, 0.5])
def test_gates_are_exact_in_float64(multiply: Multiply, off: float) -> None:
    """A kernel's numbers are float32, and yet gates in float64 have 53 bits; off may count too."""
    x, weight = normal(0, 1, 3, 1, 9, dtype=torch.float64), normal(1, 5, 9, dtype=torch.float64)
    kept = masks(multiply, 3, weight)
    y = multiply(x, weight, kept, 1 / 0.7, off, torch.empty_like(x[..., :5]))
    torch.testing.assert_close(y, written(multiply, x, weight, kept, 1 / 0.7, off, torch.float64))


def test_what_is_dropped_does_not_count_at_all() -> None:
    """An input that is no number is dropped like any other, and so is an output."""
    x, kept = torch.ones(1, 2, 1, 20, device=DEVICE), torch.ones(2, 20, dtype=torch.bool, device=DEVICE)
    x[0, 1, 0, 7], kept[1, 7] = torch.nan, False
    y = dropped_inputs(x, torch.ones(3, 20, device=DEVICE), kept, 1.0, 0.0, torch.empty_like(x[..., :3]))
    assert torch.equal(y[0, :, 0, 0].cpu(), torch.tensor([20.0, 19.0]))
    y = dropped_outputs(x, torch.ones(20, 20, device=DEVICE), ~kept, 1.0, 0.0, torch.empty_like(x))
    assert torch.equal(y[0, 0, 0].cpu(), torch.zeros(20))


@either_side
@pytest.mark.parametrize("kept", [torch.ones(3, 4), torch.ones(2, 10).bool(), torch.ones(3, 5).bool()])
def test_masks_that_do_not_fit_are_refused(multiply: Multiply, kept: Tensor) -> None:
    """Other shapes and types raise, and nothing is launched."""
    with pytest.raises(ValueError, match="masks must be bool"):
        multiply(torch.zeros(1, 3, 1, 10), torch.zeros(4, 10), kept, 2.0, 0.0, torch.zeros(1, 3, 1, 4))
