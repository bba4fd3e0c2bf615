"""Accuracy of sparse networks on digits, and the number of weights that are actually nonzero.

An MLP 64-128-128-10 with ReLU is trained on scikit-learn's digits with Adam: five seeds, each with its own
weights, masks and batches, the same for every variant. Nothing here is timed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, nn
from typing_extensions import override

from esbench.errors import UserError
from esbench.registry import REGISTRY, variant
from esbench.schema import Case
from esbench.workload import QualityMetric, UnavailableError, build
from impls.benchmark.training.workload import AbstractTrainingWorkload, check_result, quality_metric
from impls.training import networks
from impls.training.rigl import RigLScheduler

OPERATORS = REGISTRY.reserve("SparseDigits")
SEEDS = range(5)
STEPS, BATCH, LEARNING_RATE = 1500, 128, 3e-3
CHECKED_STEPS = 80
"""Steps of the training whose masks are checked."""


@variant(mode="base", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class DenseDigits:
    """A dense network, for comparison."""


@variant(
    operators=OPERATORS, source="Evci et al. 2020; SET: Mocanu et al. 2018", rule="rigl", density=(0.1, 0.05)
)
@variant(operators=OPERATORS, source="Mocanu et al. 2018", rule="set", density=(0.1, 0.05))
@variant(operators=OPERATORS, rule="static", density=(0.1, 0.05))
@dataclass(frozen=True)
class Trained:
    """A sparse network by ERK: static, grown at random (set) or where gradients are large (rigl)."""

    rule: str = ""
    density: float = 1.0


class Outcome(NamedTuple):
    """A trained network's accuracy on the test digits, and its number of weights without biases."""

    accuracy: float
    nonzero: int
    density_percent: float


def train(
    scheme: Trained | DenseDigits, seed: int, steps: int, device: str = "cpu"
) -> tuple[nn.Module, RigLScheduler | None]:
    """Train a network with seeded weights N(0, 2 / fan in); return it with its scheduler."""
    data, generator = networks.digits(), Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for inp, out in ((64, 128), (128, 128), (128, networks.CLASSES)):
        layer = nn.utils.skip_init(nn.Linear, inp, out)
        nn.init.normal_(layer.weight, 0, (2 / inp) ** 0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    scheduler = None
    if isinstance(scheme, Trained):
        scheduler = RigLScheduler(
            model,
            optimizer,
            dense_allocation=scheme.density,
            T_end=int(0.75 * steps),
            delta=25,
            sparsity_distribution="erk",
            ignore_linear_layers=False,
            static_topo=scheme.rule == "static",
            growth="random" if scheme.rule == "set" else "gradient",
            seed=seed,
        )
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator.manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(data.train_y), (BATCH,), generator=generator)
        optimizer.zero_grad()
        y = model(data.train_x[batch].to(device))
        nn.functional.cross_entropy(y, data.train_y[batch].to(device)).backward()
        if scheduler is None or scheduler():
            optimizer.step()
        rates.step()
    return model, scheduler


def train_and_test(scheme: Trained | DenseDigits, seed: int, device: str = "cpu") -> Outcome:
    """Train and test a network."""
    (model, _), data = train(scheme, seed, STEPS, device), networks.digits()
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    with torch.no_grad():
        predicted = model(data.test_x.to(device)).argmax(-1).cpu()
    nonzero = sum(int(weight.count_nonzero()) for weight in weights)
    density_percent = 100 * nonzero / sum(weight.numel() for weight in weights)
    return Outcome(float((predicted == data.test_y).double().mean()), nonzero, density_percent)


class DigitsWorkload(AbstractTrainingWorkload):
    """A trained network: it has quality metrics, and nothing is timed."""

    reason = "trainings are compared by their accuracy; steps are timed on SparseMLP"

    def __init__(self, scheme: Trained | DenseDigits, case: Case, device: str, seed: int) -> None:
        """Load the digits; raise UnavailableError if scikit-learn is not installed."""
        super().__init__(case, device, seed)
        self._scheme = scheme
        try:
            networks.digits()
        except UserError as error:
            raise UnavailableError(str(error)) from error

    @override
    def verify(self) -> None:
        model, scheduler = train(self._scheme, 0, CHECKED_STEPS, self._device)
        for layer in scheduler.layers if scheduler else ():
            is_exact = int(layer.mask.sum()) == layer.nonzero and not bool(layer.weight[~layer.mask].any())
            check_result(is_exact, f"{layer.name} does not have {layer.nonzero} active entries")
        are_finite = all(bool(weight.isfinite().all()) for weight in model.parameters())
        check_result(are_finite, "weights are not finite")

    @override
    def quality(self) -> Iterator[QualityMetric]:
        outcomes = [train_and_test(self._scheme, seed, self._device) for seed in SEEDS]
        accuracies, nonzero_counts, densities_percent = zip(*outcomes, strict=True)
        yield quality_metric("accuracy", "test digits", accuracies)
        yield quality_metric("nonzero_count", "weights", nonzero_counts)
        yield quality_metric("density_percent", "weights", densities_percent)


build.register(DenseDigits, DigitsWorkload)
build.register(Trained, DigitsWorkload)
