"""Dense noise: stored, drawn again from its stream, and as slices of a table."""

from functools import partial

import pytest
import torch
from torch import nn

from esbench.workload import WrongResultError
from impls.perturbation.noise import STREAMS
from impls.perturbation.population import perturb
from impls.schemes import Loop, NoiseTable, Perturbed, Regenerated, RegeneratedSign
from impls.schemes.noise_table import TableNoise
from impls.verify import reference
from impls.verify.reference import check_update, compute_update
from tests.scheme_cases import closed_form, make_stream


@pytest.mark.parametrize("stream", STREAMS)
def test_regenerated_noise_has_the_bits_of_stored_noise(stream: str) -> None:
    """Every member's E_m is the one that Perturbed stores, bit for bit."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(6, 5))
    stored, regenerated, loop = (
        perturb(model, scheme, members=9, sigma=0.1, antithetic=scheme != Loop(), seed=3, stream=stream)
        for scheme in (Perturbed(), Regenerated(), Loop())
    )
    noise, redrawn = stored.sample(7), regenerated.sample(7)
    for name, values in stored.dense_noise(noise).items():
        assert torch.equal(regenerated.dense_noise(redrawn)[name], values)
        assert torch.equal(regenerated.perturbation(redrawn, 4)[name], values[4])
        assert stream == "block" or torch.equal(loop.dense_noise(loop.sample(7))[name], values)


def test_a_sum_over_many_members_may_be_rounded_more_than_one_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update adds the members one after another, the reference in pieces; a missing member is found."""
    monkeypatch.setattr(reference, "piece_bytes", lambda _: 2**16)
    members = 2**15
    population = perturb(nn.Linear(8, 8, bias=False), Perturbed(), members=members, sigma=0.1)
    x, noise = torch.randn(members, 8), population.sample(1)

    def without(missing: int, utilities: torch.Tensor) -> dict[str, torch.Tensor]:
        return compute_update(
            population, noise, torch.cat([utilities[:, :missing], 0 * utilities[:, missing:]], 1)
        )

    check_update(population, x, range(members), update=partial(without, members), step=1)
    with pytest.raises(WrongResultError, match="update of weight is off by"):
        check_update(population, x, range(members), update=partial(without, members - 1), step=1)
    with pytest.raises(WrongResultError, match=r"has norm .*, and the result is about -1 times that"):
        check_update(
            population, x, range(members), update=lambda utilities: without(members, -utilities), step=1
        )


def test_a_weight_beyond_the_counters_is_refused_before_drawing() -> None:
    """Regenerated noise of a weight with more elements than counters raises before it is drawn."""
    for scheme, shape in ((Regenerated(), (1, 2**18, 2**17)), (RegeneratedSign(), (1, 2**20, 2**20))):
        with pytest.raises(ValueError, match="is outside the counter range"):
            scheme.sample(
                torch.empty(shape, device="meta"), make_stream(range(2), name="philox", dtype=torch.float32)
            )


def draw_table(shape: tuple[int, ...], members: range, *, step: int = 0, ratio: int = 16) -> TableNoise:
    """Draw a table and the members' offsets."""
    stream = make_stream(members, step=step, dtype=torch.float32)
    return NoiseTable(ratio).sample(torch.zeros(shape), stream)


def test_a_perturbation_is_a_slice_of_the_table() -> None:
    """E_m is the table from the member's offset on, in the weight's shape; slices begin everywhere."""
    for shape in ((1, 6, 5), (2, 3, 2, 3, 3)):
        noise, size = draw_table(shape, range(20)), torch.Size(shape).numel()
        assert noise.table.shape == (16 * size,)
        for offset, dense in zip(noise.offsets.tolist(), NoiseTable().dense_noise(noise), strict=True):
            assert torch.equal(dense, noise.table[offset : offset + size].view(shape))
    noise = draw_table((1, 2, 2), range(2048), ratio=3)
    assert NoiseTable(3).offset_count(noise.shape) == 9
    assert sorted(set(noise.offsets.tolist())) == list(range(9))


def test_parts_of_a_step_share_a_table_and_steps_do_not() -> None:
    """Steps share no number and parts of a step the table; kappa is d over the number of offsets."""
    first, later = draw_table((1, 8, 8), range(4)), draw_table((1, 8, 8), range(4), step=1)
    assert not bool(torch.isin(first.table, later.table).any())
    assert torch.equal(first.table, draw_table((1, 8, 8), range(256, 260)).table)
    assert closed_form(NoiseTable(3), (8, 12), 96) == 96 / (2 * 96 + 1)
    # A forward reads the slices, or the whole table if they are more than that.
    weight = torch.zeros(1, 8, 8)
    few, many = draw_table((1, 8, 8), range(3)), draw_table((1, 8, 8), range(300))
    assert NoiseTable().read_bytes(weight, few) == weight.nbytes * (1 + 3) + 24
    assert NoiseTable().read_bytes(weight, many) == weight.nbytes * (1 + 16) + 2400
