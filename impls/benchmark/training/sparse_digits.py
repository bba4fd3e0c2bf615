"""How well sparse networks read digits, at the number of weights that are really not zero.

An MLP 64-128-128-10 with ReLU learns the digits of scikit-learn by Adam: five seeds, each with weights, masks
and batches of its own, the same for every variant. Nothing here is timed.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.errors import UserError
from esbench.registry import REGISTRY, Figure, UnavailableError, Workload, WrongResultError, build, variant
from esbench.schema import PHASES, Case, Phase, Work
from impls.benchmark import networks
from impls.training.rigl import RigLScheduler

OPERATORS = REGISTRY.reserve("SparseDigits")
SEEDS = range(5)
STEPS, BATCH, LEARNING_RATE = 1500, 128, 3e-3
DELTA = 25
ALPHA = 0.3
NOT_TIMED = "trainings are compared by their accuracy; steps are timed on SparseMLP"
TRIED_STEPS = 80
"""Of the training that is held to what must hold of its connections."""


class Outcome(NamedTuple):
    """What came of a training: the share of test digits read rightly, and the network's weights."""

    accuracy: float
    nonzero: int
    total: int


@variant(mode="base", baseline=True, operators=OPERATORS)
@dataclass(frozen=True)
class DenseDigits:
    """All weights: what sparse networks are held to."""


@variant(
    operators=OPERATORS, source="Evci et al. 2020; SET: Mocanu et al. 2018", rule="rigl", density=(0.1, 0.05)
)
@variant(operators=OPERATORS, source="Mocanu et al. 2018", rule="set", density=(0.1, 0.05))
@variant(operators=OPERATORS, rule="static", density=(0.1, 0.05))
@dataclass(frozen=True)
class Trained:
    """A share of the weights by ERK: connections stay, are grown at random, or where gradients are large."""

    rule: str = ""
    density: float = 1.0


def network(seed: int, widths: Sequence[int] = (64, 128, 128, 10)) -> nn.Sequential:
    """Make the MLP with seeded weights N(0, 2 / fan in) and biases of zero."""
    layers: list[nn.Module] = []
    generator = Generator().manual_seed(seed)
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.utils.skip_init(nn.Linear, wide, narrow), nn.ReLU()]
        nn.init.normal_(layers[-2].get_parameter("weight"), 0, (2 / wide) ** 0.5, generator=generator)
        nn.init.zeros_(layers[-2].get_parameter("bias"))
    return nn.Sequential(*layers[:-1])


def scheduler_of(
    scheme: Trained, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int
) -> RigLScheduler:
    """Make the model sparse as a variant says."""
    return RigLScheduler(
        model,
        optimizer,
        dense_allocation=scheme.density,
        T_end=int(0.75 * steps),
        delta=DELTA,
        alpha=ALPHA,
        sparsity_distribution="erk",
        static_topo=scheme.rule == "static",
        growth="random" if scheme.rule == "set" else "gradient",
        seed=seed,
    )


def trained(
    scheme: Trained | DenseDigits, seed: int, steps: int = STEPS, device: str = "cpu"
) -> tuple[nn.Module, RigLScheduler | None]:
    """Train a network; return it with its scheduler."""
    data, model = networks.digits(), network(seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    scheduler = scheduler_of(scheme, model, optimizer, steps, seed) if isinstance(scheme, Trained) else None
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(data.train_y), (BATCH,), generator=generator)
        optimizer.zero_grad()
        y = model(data.train_x[batch].to(device))
        nn.functional.cross_entropy(y, data.train_y[batch].to(device)).backward()
        if scheduler is None or scheduler():
            optimizer.step()
        rates.step()
    return model, scheduler


def outcome(scheme: Trained | DenseDigits, seed: int, steps: int = STEPS, device: str = "cpu") -> Outcome:
    """Train a network and test it; weights count, biases do not."""
    model, _ = trained(scheme, seed, steps, device)
    weights = [one for one in model.parameters() if one.dim() > 1]
    data = networks.digits()
    with torch.no_grad():
        named = model(data.test_x.to(device)).argmax(-1).cpu()
    return Outcome(
        accuracy=float((named == data.test_y).double().mean()),
        nonzero=sum(int(one.count_nonzero()) for one in weights),
        total=sum(one.numel() for one in weights),
    )


class DigitsWorkload(Workload):
    """A variant on the digits: it has a quality, and nothing to be timed."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()
    phases: Mapping[Phase, Callable[[], object]] = {}
    unavailable: Mapping[Phase, str] = dict.fromkeys(PHASES, NOT_TIMED)

    def __init__(self, scheme: Trained | DenseDigits, device: str) -> None:
        """Look for the digits.

        Raises:
            UnavailableError: scikit-learn is not installed.

        """
        self._scheme, self._device = scheme, device
        try:
            networks.digits()
        except UserError as error:
            raise UnavailableError(str(error)) from error

    @override
    def work(self, phase: Phase) -> Work | None:
        return None

    @override
    def enter(self, phase: Phase) -> None:
        """Hold nothing."""

    @override
    def verify(self) -> None:
        model, scheduler = trained(self._scheme, 0, TRIED_STEPS, self._device)
        for layer in scheduler.layers if scheduler else ():
            if int(layer.mask.sum()) != layer.kept or bool(layer.weight[~layer.mask].any()):
                message = f"{layer.name} has other than {layer.kept} connections"
                raise WrongResultError(message)
        if any(not bool(one.isfinite().all()) for one in model.parameters()):
            message = "weights are not finite"
            raise WrongResultError(message)

    @override
    def confirm(self, phase: Phase) -> None:
        """Nothing was timed."""

    @override
    def quality(self) -> Iterator[Figure]:
        found = [outcome(self._scheme, seed, STEPS, self._device) for seed in SEEDS]
        yield Figure("accuracy", "test digits", tuple(one.accuracy for one in found))
        yield Figure("nonzero_count", "weights", tuple(float(one.nonzero) for one in found))
        yield Figure("density_percent", "weights", tuple(100 * one.nonzero / one.total for one in found))


@build.register
def _dense(scheme: DenseDigits, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  # dispatched on
    return DigitsWorkload(scheme, device)


@build.register
def _sparse(scheme: Trained, case: Case, device: str, seed: int) -> Workload:  # noqa: ARG001  # dispatched on
    return DigitsWorkload(scheme, device)
