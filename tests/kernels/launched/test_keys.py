"""Keys made of a step on the device are those made of the same number by the host, and kernels load them."""

import pytest
import torch

from impls.kernels.binary import sample_bits
from impls.kernels.dense_rng import dense_rng_product, noise_sum
from impls.kernels.lowrank_rng import low_rank_rng_product
from impls.kernels.philox import Draw, fill, round_keys
from impls.perturbation import philox
from tests.kernels.launched.canaries import DEVICE

PLACE = philox.Place.of(3, 17, "0.weight", "dense")
SCHEDULE = (philox.ROUNDS, philox.WEYL)
MEMBERS = range(5, 8)
STEPS = (0, 1, 9, 10, 99, 12345, 10**17, 10**18 - 1, 10**18, 2**63 - 1)


def draws() -> tuple[Draw, Draw]:
    """Return one draw with the key of a number, and with the keys of a step on the device."""
    assert isinstance(PLACE.key, tuple)
    one = Draw(PLACE.key, PLACE.layer, PLACE.draw, MEMBERS)
    return one, one._replace(key=round_keys(3, torch.tensor(17, device=DEVICE), *SCHEDULE))


@pytest.mark.parametrize("seed", [0, 7, 99999, 1234567890123, 2**64 - 1])
def test_keys_are_those_of_the_number(seed: int) -> None:
    """Steps and seeds of any number of digits have the digest that hashlib computes."""
    for number in STEPS:
        found = round_keys(seed, torch.tensor(number, device=DEVICE), *SCHEDULE).cpu()
        assert torch.equal(found, philox.device_keys(seed, torch.tensor(number)))


def test_a_seed_of_too_many_digits_is_refused() -> None:
    """Its message needs more room than the kernel has."""
    with pytest.raises(ValueError, match="a seed is below 2\\^64"):
        round_keys(2**64, torch.tensor(0, device=DEVICE), *SCHEDULE)


@pytest.mark.parametrize("signs", [False, True])
def test_kernels_draw_the_same_with_either(signs: bool) -> None:
    """Every kernel that draws takes keys on the device in place of numbers."""
    x = torch.linspace(-1, 1, 3 * 40, device=DEVICE).view(1, 3, 1, 40)
    weight = torch.linspace(-1, 1, 24 * 40, device=DEVICE).view(24, 40)
    y, utilities = x.new_empty(1, 3, 1, 24), x.new_ones(3)
    planes = torch.arange(9 * 6, device=DEVICE).view(9, 6)
    rows = x.repeat(20, 1, 1, 1)
    results = [
        [
            fill(x.new_empty(3, 300), draw, signs=signs),
            noise_sum(draw, utilities, 300, signs=signs),
            dense_rng_product(x, weight, draw, 0.1, y.clone(), signs=signs),
            dense_rng_product(rows, weight, draw, 0.1, y.repeat(20, 1, 1, 1), signs=signs),
            low_rank_rng_product(x, weight, draw, draw._replace(draw=2), 2, 0.1, y.clone(), signs=signs),
            sample_bits(planes, *draw),
        ]
        for draw in draws()
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
