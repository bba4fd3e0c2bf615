"""Counter-based noise: planted bugs in its counters are found, and schemes that need it refuse others."""

import pytest
import torch
from torch import Tensor, nn

from esbench.registry import WrongResultError
from impls.kernels import FusedRegenerated
from impls.perturbation import philox
from impls.perturbation.philox import Kind, Place
from impls.perturbation.population import perturb
from impls.schemes import Loop, Perturbed
from impls.verify.checks import Setting, check_independence


def test_a_loop_has_the_noise_of_the_whole_population() -> None:
    """Where a stream draws any member alone, a loop over members sees the noise that is stored for all."""
    written = [
        perturb(nn.Linear(3, 2), scheme, members=5, sigma=0.1, stream="philox")
        for scheme in (Loop(), Perturbed())
    ]
    first, second = (population.dense_noise(population.sample(1)) for population in written)
    assert torch.equal(first["weight"], second["weight"])


def dense() -> Setting:
    """Take dense noise on a small layer."""
    return Setting(Perturbed(), nn.Linear(6, 5).double(), (6,), stream="philox")


COUNTERS = Place.of


def without_layer(seed: int, step: int, layer: str, draw: str) -> Place:
    """Find the same place for every layer."""
    return COUNTERS(seed, step, layer.partition(".")[2], draw)


def without_kind(seed: int, step: int, layer: str, draw: str) -> Place:
    """Find the same place for weight and bias."""
    return COUNTERS(seed, step, layer.rpartition(".")[0], draw)


def without_step(seed: int, step: int, layer: str, draw: str) -> Place:  # noqa: ARG001  the signature of what it replaces
    """Find the same place at every step."""
    return COUNTERS(seed, 0, layer, draw)


def without_seed(seed: int, step: int, layer: str, draw: str) -> Place:  # noqa: ARG001  the signature of what it replaces
    """Find the same place whatever the seed."""
    return COUNTERS(0, step, layer, draw)


BUGS = {
    "between layers": without_layer,
    "between weight and bias": without_kind,
    "between steps": without_step,
    "between seeds": without_seed,
}


@pytest.mark.parametrize("words", BUGS)
def test_a_counter_that_is_left_out_is_found(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that repeats for want of a counter is found by its correlation, and is not without the bug."""
    monkeypatch.setattr(Place, "of", BUGS[words])
    with pytest.raises(WrongResultError, match=words):
        check_independence(dense())
    monkeypatch.undo()
    check_independence(dense())


def test_members_that_share_a_counter_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise without the member's counter is found: two members have the same."""
    fill = philox.fill

    def without_member(values: Tensor, kind: Kind, place: Place, members: range, elements: range) -> Tensor:
        one = values.new_empty(1, values.shape[1])
        return values.copy_(fill(one, kind, place, range(members.start, members.start + 1), elements))

    monkeypatch.setattr(philox, "fill", without_member)
    with pytest.raises(WrongResultError, match="two members have the same noise"):
        check_independence(dense())


def test_a_scheme_that_draws_in_kernels_is_refused_another_stream_at_once() -> None:
    """Before anything is drawn; without a stream it has the one that it needs."""
    pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")
    model = nn.Sequential(nn.Linear(8, 8, device="meta"))
    drawn = {"0": FusedRegenerated()}
    assert perturb(model, drawn, members=4, sigma=0.1).members == 4
    with pytest.raises(ValueError, match=r"FusedRegenerated.* philox: leave stream out.*'block'"):
        perturb(model, drawn, members=4, sigma=0.1, stream="block")
