"""Compares the fitted kappa of every registered scheme with the closed form that it declares."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Generator, nn

from esbench.registry import load
from esbench.schema import Case
from esbench.workload import WrongResultError, build
from impls.perturbation.noise import NoiseStream
from impls.perturbation.scheme import AbstractScheme, AnyScheme
from impls.quality import kappa
from impls.quality.kappa import Subject, moments
from impls.schemes import Flipped, NoiseTable, Orthogonal, Permuted, Perturbed
from impls.schemes.dense import DenseNoise
from tests.workload_cases import NUMBERS

load("impls")

RELATIVE, ABSOLUTE = 0.05, 0.02
"""Allowed difference of a fitted kappa from its closed form: the larger of the two."""
MEMBERS = 192
MIN_SEEDS, MAX_SEEDS = 10, 100
"""Limits of the number of replicates; they end when the standard error is a third of what is allowed."""
CORES = (1, 5)
OPTIONS: list[AnyScheme] = [
    Permuted(in_sparsity=0.5, cores=3),
    Permuted("out", out_sparsity=0.4, cores=3),
    Permuted("both", in_sparsity=0.5, out_sparsity=0.5, cores=3),
    NoiseTable(2),
    Orthogonal(3),
]
"""Options that no registered variant has."""

LAYERS = {
    "linear": (nn.Linear, (20, 40), {}),
    "convolution": (nn.Conv2d, (14, 20, (3, 2)), {"groups": 2}),
}
"""Layers with different widths on both sides that are not powers of two, and with taps and groups."""


def name_schemes() -> dict[AnyScheme, str]:
    """Return every registered scheme, those with shared cores also with 1 and 5 cores, and other options."""
    names: dict[AnyScheme, str] = {}
    for entry in NUMBERS:
        if isinstance(entry.scheme, AbstractScheme):
            names.setdefault(entry.scheme, entry.variant.name)
            for cores in CORES if hasattr(entry.scheme, "cores") else ():
                changed = dataclasses.replace(entry.scheme, cores=cores)  # type: ignore[type-var]  # schemes are dataclasses
                names.setdefault(changed, f"{entry.variant.name} with cores={cores}")
    return names | {scheme: str(scheme) for scheme in OPTIONS}


SCHEMES = name_schemes()


def fill_unevenly(weight: torch.Tensor, generator: Generator) -> None:
    """Fill a weight with Gaussian values whose scale differs between inputs."""
    inputs = torch.linspace(0.2, 2, weight.shape[1])
    weight.normal_(generator=generator).mul_(inputs.view(-1, *[1] * (weight.dim() - 2)))


FILLS: dict[str, Callable[[torch.Tensor, Generator], object]] = {
    "uniform": lambda weight, generator: weight.uniform_(-1, 1, generator=generator),
    "gaussian": lambda weight, generator: weight.normal_(generator=generator),
    "uneven": fill_unevenly,
}
"""Random ways to fill a layer's weights, whose moments differ from the ideal ones by chance."""


def make_layer(layer: str, seed: int, fill: str = "") -> nn.Module:
    """Make a layer with the given fill, by default with quantiles of a Gaussian in a random order."""
    make, shape, options = LAYERS[layer]
    module = nn.utils.skip_init(make, *shape, bias=False, **options)
    if fill:
        with torch.no_grad():
            FILLS[fill](module.weight, Generator().manual_seed(seed))
        return module
    size = module.weight.numel()
    quantiles = torch.special.ndtri((torch.arange(size, dtype=torch.float64) + 0.5) / size)
    order = torch.randperm(size, generator=Generator().manual_seed(seed))
    with torch.no_grad():
        module.weight.copy_(quantiles[order].view_as(module.weight))
    return module


def fit_kappa(scheme: AnyScheme, layer: str, allowed: float, fill: str = "") -> tuple[float, float]:
    """Return mean and standard error of kappa over noise, and over weights too unless a fill is given."""
    values: list[float] = []
    for seed in range(MAX_SEEDS):
        subject = Subject(make_layer(layer, 0 if fill else seed, fill), scheme, MEMBERS, seed=seed)
        values.append(kappa.estimate_kappa(moments(subject.sample(0, MEMBERS)), subject.size))
        if len(values) >= MIN_SEEDS and _error(values) < allowed / 3:
            break
    return statistics.mean(values), _error(values)


def _error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def check_fit(scheme: AnyScheme, layer: str, fill: str) -> bool:
    """Compare the fitted kappa with the closed form; return False where the scheme has none for the layer."""
    try:
        declared = kappa.declared_kappa(Subject(make_layer(layer, 0, fill), scheme, MEMBERS))
    except ValueError:  # the scheme does not support such a layer
        return False
    if declared is None:
        return False
    allowed = max(RELATIVE * abs(declared), ABSOLUTE)
    mean, error = fit_kappa(scheme, layer, allowed, fill)
    numbers = f"{layer} {fill}: {mean:.4g} +- {error:.2g}, declared {declared:.4g}"
    assert error <= allowed / 2, numbers
    assert abs(mean - declared) <= allowed, numbers
    return True


def scales_with_weight(scheme: AnyScheme) -> bool:
    """Return whether the scheme's noise scales with the weight."""
    return isinstance(scheme.noise_std(torch.ones(1, 4, 4), 1.0), torch.Tensor)


@pytest.mark.parametrize("scheme", SCHEMES, ids=SCHEMES.values())
def test_fitted_kappa_is_the_closed_form(scheme: AnyScheme) -> None:
    """The fitted kappa is within 5 % or 0.02 of the declared one, its standard error at most half of that.

    For noise that scales with the weight, this holds for each way to fill the weight.
    """
    fills = ("", *FILLS) if scales_with_weight(scheme) else ("",)
    if not any([check_fit(scheme, layer, fill) for layer in LAYERS for fill in fills]):  # noqa: C419  all of them
        pytest.skip("no closed form is declared")


def test_zero_weights_have_no_closed_form() -> None:
    """Noise that scales with the weight has no closed form of kappa where the weight is zero."""
    kappas = [scheme.kappa(torch.zeros(1, 4, 4), 8) for scheme in SCHEMES if scales_with_weight(scheme)]
    assert kappas
    assert set(kappas) == {None}


@pytest.mark.parametrize("wrong", [0.9, 1.1])
def test_a_closed_form_that_is_off_by_a_tenth_is_found(wrong: float) -> None:
    """The comparison finds a closed form, here of flips on one side, that is 10 % too small or too large."""
    scheme = Flipped(side="out")
    declared = wrong * (kappa.declared_kappa(Subject(make_layer("linear", 0), scheme, MEMBERS)) or 0.0)
    mean, error = fit_kappa(scheme, "linear", RELATIVE * declared)
    assert abs(mean - declared) > max(RELATIVE * declared, 2 * error)


CHECKED = Case(operator="Linear", out_channels=5, in_channels=6, members=8, dtype="float64", bias=True)


def in_pairs(stream: NoiseStream, values: torch.Tensor) -> torch.Tensor:
    """Return noise in which member 2j + 1 has the negative of member 2j."""
    first = [member - member % 2 - stream.members.start for member in stream.members]
    signs = torch.tensor([1.0 - 2 * (member % 2) for member in stream.members], dtype=values.dtype)
    return values[first] * signs.view(-1, *[1] * (values.dim() - 1))


def with_a_common_part(stream: NoiseStream, values: torch.Tensor) -> torch.Tensor:
    """Return noise of which a tenth of the variance is one draw for all members, times a sign of each."""
    common = stream.shared().normal("common", *values.shape[1:])
    signs = stream.signs("signs", 1).view(-1, *[1] * (values.dim() - 1))
    return math.sqrt(0.9) * values + math.sqrt(0.1) * signs * common


@pytest.mark.parametrize("share", [in_pairs, with_a_common_part])
def test_members_that_share_noise_have_no_kappa_of_0(
    share: Callable[[NoiseStream, torch.Tensor], torch.Tensor],
) -> None:
    """The check refuses a scheme that declares independent members, but draws their noise together."""

    def sample(_: Perturbed, weight: torch.Tensor, stream: NoiseStream) -> DenseNoise:
        values = stream.normal("dense", *weight.shape)
        return DenseNoise(values if values.is_meta else share(stream, values))

    scheme = type("Sharing", (Perturbed,), {"sample": sample})()
    work = build(scheme, CHECKED, "cpu", 0)
    with pytest.raises(WrongResultError, match=r"^kappa\(\) returns 0 .* has a kappa of \d+.* ± \d"):
        work.verify()
    work.enter("sample")
    with pytest.raises(WrongResultError, match=r"^kappa\(\) returns 0"):
        work.confirm("sample")


@pytest.mark.parametrize("wrong", [0.3, 3.0, math.nan])
def test_a_declared_kappa_is_compared_with_its_estimate(wrong: float) -> None:
    """A closed form that is a third or three times the true one, or NaN, is refused; the true one is not."""
    layer = make_layer("linear", 0)
    true = kappa.declared_kappa(Subject(layer, Flipped(), MEMBERS)) or 0.0
    kappa.check_kappa(Flipped(), layer)
    scheme = type("Wrong", (Flipped,), {"kappa": lambda *_: wrong * true})()
    with pytest.raises(WrongResultError, match=rf"^kappa\(\) returns {wrong * true:.3g} for 64 members, but"):
        kappa.check_kappa(scheme, layer)


def test_an_unlucky_estimate_of_kappa_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate from few steps is too low if no pair of members overlaps; a second one has more steps."""
    estimates = iter([*itertools.repeat(-0.8, kappa.CHECKED_STEPS), *itertools.repeat(0.1, 1000)])
    monkeypatch.setattr(kappa, "estimate_kappa", lambda *_: next(estimates))
    kappa.check_kappa(Perturbed(), make_layer("linear", 0))
    assert len([*estimates]) == 1000 - kappa.CONFIRMED_STEPS
