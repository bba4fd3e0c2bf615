"""The workload of suite ``peers``: one generation of an evolution strategy that trains a classifier.

A generation draws antithetic perturbations, evaluates the mean cross-entropy of every member on the same
batch, shapes it, and takes a step of plain SGD. Libraries differ in their noise, so each one is compared with
what does not depend on it: the losses of drawn members, and the gradient that many updates add up to.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, ClassVar

import msgspec
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from typing_extensions import override

from esbench.schema import PHASES, Case, Phase, Work
from esbench.workload import QualityMetric, UnavailableError, Workload, WrongResultError, build
from impls.benchmark import inputs
from impls.benchmark.peers.networks import MLP, input_shape, network
from impls.benchmark.training.memory_reclaim import reset_peak, status_bytes
from impls.benchmark.training.workload import check_result, check_supported, quality_metric
from impls.training import networks
from impls.training.memory_reclaim import call_in_fresh_process
from impls.verify import reference

CHECKED_PAIRS = 1024
"""Pairs whose updates are added up to find the gradient's direction."""
LEAST_COSINE = 0.5
"""The least share of the cosine that independent noise would give."""
LEARNED = Case(operator=MLP, out_channels=64, in_channels=64, members=128, repeats=64, antithetic=True)
"""The case on which training is compared."""
GENERATIONS, LEARNING_RATE = 200, 0.01
"""Generations of the training that is compared, and their learning rate."""
LEARNS = 0.7
"""The largest loss after training, as a share of that before it."""
MEASURED_ALONE = msgspec.structs.replace(LEARNED, members=1024)
"""The case whose memory is measured in processes that run one variant each."""


@dataclass(frozen=True)
class Task:
    """What is trained, and how.

    Attributes:
        operator: that of the case, which names the network.
        model: the network at its start; not to be changed.
        input_shape: the shape of one of its inputs.
        y: the classes of the batch [rows].
        population: evaluations in a generation, twice the number of antithetic pairs.
        sigma: scale of the noise.
        learning_rate: that of SGD on the estimate 1 / (population sigma) sum_m c_m E_m, where c are the
            centered ranks of the losses.
        seed: seed of the noise.
    """

    operator: str
    model: nn.Sequential
    input_shape: tuple[int, ...]
    y: Tensor
    population: int
    sigma: float
    learning_rate: float
    seed: int

    @property
    def pairs(self) -> int:
        """The number of antithetic pairs."""
        return self.population // 2

    @property
    def start(self) -> Tensor:
        """A copy of the network's parameters [d]."""
        return parameters_to_vector(self.model.parameters()).detach().clone()


class AbstractSearch(ABC):
    """The state of one library's search: its distribution's center and its generator."""

    generations = 1
    """The generations of a call of :meth:`step`."""

    @abstractmethod
    def step(self, x: Tensor) -> Tensor:
        """Take a generation on a batch [rows, pixels]; return the losses that it saw."""

    @abstractmethod
    def center(self) -> Tensor:
        """Return the parameters of the unperturbed network [d]."""


class AbstractOpenSearch(AbstractSearch):
    """A search whose library lets the caller evaluate the population that it draws."""

    @abstractmethod
    def draw(self) -> Any:  # noqa: ANN401  a library's own
        """Return the members of the next generation."""

    @abstractmethod
    def evaluate(self, drawn: Any, x: Tensor) -> Tensor:  # noqa: ANN401  the same
        """Return the mean cross-entropy of each member of a population on a batch."""

    @abstractmethod
    def member(self, drawn: Any, index: int) -> Tensor:  # noqa: ANN401  the same
        """Return the parameters [d] of the member whose loss is at an index of :meth:`evaluate`'s result."""


@dataclass(frozen=True)
class AbstractPeer(ABC):
    """A way to take generations."""

    DTYPES: ClassVar[tuple[str, ...]] = ("float32", "float64")
    SHAPES_LOSSES: ClassVar[bool] = True
    """Whether it shapes losses, so that one learning rate fits: the gradient's norm has no influence."""

    @abstractmethod
    def search(self, task: Task) -> AbstractSearch:
        """Start a search; raise UnavailableError if it cannot run here."""

    def effective_members(self, task: Task, x: Tensor) -> float | None:  # noqa: ARG002  some depend on it
        """Return n_eff by the quality law on a batch, None if it has no closed form."""
        return float(task.pairs)


@dataclass(frozen=True)
class AbstractLibrary(AbstractPeer):
    """A library that is installed by the dependency group ``peers``; its variant is written for a version."""

    NAME: ClassVar[str]
    version: str

    def modules(self, *names: str) -> tuple[Any, ...]:
        """Import modules of the library.

        Raises:
            UnavailableError: the library is missing, has another version, or cannot be imported.
        """
        try:
            installed = metadata.version(self.NAME)
        except metadata.PackageNotFoundError:
            raise UnavailableError(f"{self.NAME} is not installed: nox -s peers installs it") from None
        check_supported(
            installed == self.version,
            f"{self.NAME} {installed} is installed; this variant is written for {self.version}",
        )
        try:
            return tuple(import_module(name) for name in names)
        except Exception as error:  # a library may raise anything
            raise UnavailableError(f"{self.NAME} cannot be imported: {error}") from error


def cross_entropy(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of logits [rows, classes] with classes [rows].

    It is that of torch with the classes in the middle axis: on a CPU torch's softmax of a short last axis
    takes two to three times as long.
    """
    losses = functional.cross_entropy(logits.T.unsqueeze(0), y.unsqueeze(0), reduction=reduction)
    return losses.flatten() if reduction == "none" else losses


def mean_loss(model: nn.Sequential, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of a network with these parameters [d] on a batch."""
    weights, position = {}, 0
    for name, parameter in model.named_parameters():
        weights[name] = parameters[position : position + parameter.numel()].view(parameter.shape)
        position += parameter.numel()
    return cross_entropy(torch.func.functional_call(model, weights, (x,)), y)


def gradient(model: nn.Sequential, parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient [d] of :func:`mean_loss`."""
    leaf = parameters.detach().clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(mean_loss(model, leaf, x, y), leaf)
    return slope


class PeerWorkload(Workload):
    """Generations of one variant, with hardly any learning, so that each takes the same work."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()

    def __init__(self, scheme: AbstractPeer, case: Case, device: str, seed: int) -> None:
        """Start a search; raise UnavailableError if the variant cannot run here."""
        check_supported(
            case.antithetic and case.repeats % 2 == 0, "all libraries are compared with antithetic pairs"
        )
        check_supported(case.dtype in scheme.DTYPES, f"it is written for {', '.join(scheme.DTYPES)}")
        self._scheme, self._case, self._device, self._seed = scheme, case, device, seed
        rows = case.repeats // 2
        shape = input_shape(case)
        x = inputs.normal(rows, *shape, device=device, dtype=inputs.dtype_of(case), seed=seed + 1)
        self._x = inputs.RotatingBuffers(x)
        self.inputs = self._x.items
        start_ns = time.perf_counter_ns()
        self._task = task_of(case, device, seed, y=classes(rows, device, seed))
        self._search = scheme.search(self._task)
        self._search.step(self._x.items[0])
        self._first_ns = time.perf_counter_ns() - start_ns
        self._start = self._search.center().clone()
        self._drawn: object = None

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        if isinstance(self._search, AbstractOpenSearch):
            return {"forward": self._forward, "step": self._step}
        return {"step": self._step}

    @property
    @override
    def unavailable(self) -> Mapping[Phase, str]:
        reason = "generations are measured as a whole, and where a library has one, its evaluation"
        return {phase: reason for phase in PHASES if phase not in self.phases}

    @override
    def work(self, phase: Phase) -> Work | None:
        return None

    @override
    def enter(self, phase: Phase) -> None:
        self._drawn = None
        if phase == "forward":
            self._drawn = self._open_search.draw()
        self._x.restart()

    @override
    def verify(self) -> None:
        """Check the losses of drawn members, and that updates add up to the gradient."""
        if isinstance(self._search, AbstractOpenSearch):
            self.enter("forward")
            self._check_losses()
        self.enter("step")
        self._check_direction()

    @override
    def confirm(self, phase: Phase) -> None:
        inputs.refill(self._case, self.inputs)
        if phase == "forward":
            self._check_losses()
        elif phase == "step":
            self._check_direction()

    @override
    def quality(self) -> Iterator[QualityMetric]:
        yield quality_metric("set_up_ns", "first generation", [self._first_ns])
        n_eff = self._scheme.effective_members(self._task, self._x.items[0])
        samples = [] if n_eff is None else [n_eff]
        yield quality_metric("n_eff_count", "quality law", samples, "" if samples else "no closed form")
        where = (
            f"compared on {LEARNED.label}" if self._scheme.SHAPES_LOSSES else "it needs another learning rate"
        )
        losses: Sequence[float] = ()
        if self._is(LEARNED) and self._scheme.SHAPES_LOSSES:
            losses = training_curve(self._scheme, self._case, self._device, self._seed)
        yield quality_metric("loss", "start", losses[:1], "" if losses else where)
        yield quality_metric("loss", f"{GENERATIONS} generations", losses[-1:], "" if losses else where)
        where = f"measured on {MEASURED_ALONE.label}"
        peaks = []
        if self._is(MEASURED_ALONE) and self._device == "cpu":
            peaks = [call_in_fresh_process(search_peak_bytes, self._scheme, self._case, self._seed)]
        yield quality_metric("process_peak_bytes", "fresh process", peaks, "" if peaks else where)

    def _is(self, case: Case) -> bool:
        return msgspec.structs.replace(self._case, dtype=case.dtype) == case

    @property
    def _open_search(self) -> AbstractOpenSearch:
        if not isinstance(self._search, AbstractOpenSearch):
            raise TypeError("only an open search has a forward")
        return self._search

    def _forward(self) -> Tensor:
        return self._open_search.evaluate(self._drawn, self._x.take())

    def _step(self) -> Tensor:
        return self._search.step(self._x.take())

    def _check_losses(self) -> None:
        """Compare the losses of the first, the last and a random member with those of its parameters."""
        self._x.restart()
        x, losses = self._x.items[0], self._forward()
        count = self._task.population
        check_result(losses.shape == (count,), f"losses have shape {list(losses.shape)}, not [{count}]")
        for index in (0, *reference.random_members(count, 1), count - 1):
            parameters = self._open_search.member(self._drawn, index)
            model, y = self._task.model, self._task.y
            rounded = mean_loss(model, parameters, x, y)
            expected = mean_loss(model.double(), parameters.double(), x.double(), y)
            model.to(x.dtype)
            reference.check_close(
                f"loss of member {index}", losses[index], expected, rounded, inputs.eps_of(self._case)
            )
        is_other = not torch.equal(self._open_search.member(self._drawn, 0), self._search.center())
        check_result(is_other, "member 0 is not perturbed")

    def _check_direction(self) -> None:
        """Compare the sum of updates on each batch with its gradient.

        One sum for all batches would fail where their gradients cancel.
        """
        task, turns, search = self._task, len(self.inputs), self._search
        calls = math.ceil(CHECKED_PAIRS / (task.pairs * search.generations * turns))
        center = search.center().double()
        model = task.model.double()
        slopes = [gradient(model, center, x.double(), task.y) for x in self.inputs]
        model.to(self.inputs[0].dtype)
        changes = torch.zeros(turns, len(center), dtype=torch.double, device=center.device)
        self._x.restart()
        for call in range(calls * turns):
            before = center
            self._step()
            center = search.center().double()
            changes[call % turns] += center - before
        pairs = calls * search.generations * task.pairs
        least = LEAST_COSINE * math.sqrt(pairs / (pairs + len(center)))
        for change, slope in zip(changes, slopes, strict=True):
            check_result(bool(change.any()), f"the sum of {calls} updates is zero")
            cosine = -float(change @ slope / (change.norm() * slope.norm()))
            check_result(
                cosine >= least,
                f"the sum of {calls} updates has a cosine of {cosine:.3g} with the negative gradient, less "
                f"than {least:.3g}",
            )


def classes(rows: int, device: str, seed: int) -> Tensor:
    """Return random classes of a batch [rows]."""
    generator = Generator().manual_seed(seed)
    return torch.randint(networks.CLASSES, (rows,), generator=generator).to(device)


def task_of(
    case: Case, device: str, seed: int, *, y: Tensor, learning_rate: float = inputs.LEARNING_RATE
) -> Task:
    """Return the task of a case, with the same start for every variant."""
    model = network(case, seed).to(device).requires_grad_(requires_grad=False)
    return Task(case.operator, model, input_shape(case), y, 2 * case.members, case.sigma, learning_rate, seed)


def training_curve(scheme: AbstractPeer, case: Case, device: str, seed: int) -> list[float]:
    """Train on digits; return the mean cross-entropy on all of them before and after.

    Every variant sees the same batches.

    Raises:
        WrongResultError: the loss hardly falls.
    """
    data, rows = networks.digits(), case.repeats // 2
    generator = Generator().manual_seed(seed)
    y = torch.zeros(rows, dtype=torch.int64, device=device)
    task = task_of(case, device, seed, y=y, learning_rate=LEARNING_RATE)
    search = scheme.search(task)
    dtype = inputs.dtype_of(case)
    all_x, all_y = data.train_x.to(device, dtype).view(-1, *task.input_shape), data.train_y.to(device)
    x = torch.empty(rows, *task.input_shape, device=device, dtype=dtype)
    losses = [float(mean_loss(task.model, search.center(), all_x, all_y))]
    for _ in range(GENERATIONS // search.generations):
        batch = torch.randint(len(all_y), (rows,), generator=generator).to(device)
        x.copy_(all_x[batch])
        y.copy_(all_y[batch])
        search.step(x)
    losses.append(float(mean_loss(task.model, search.center(), all_x, all_y)))
    check_learning(losses)
    return losses


def check_learning(losses: Sequence[float]) -> None:
    """Raise WrongResultError unless the last loss is well below the first."""
    first, *_, last = losses
    if not last <= LEARNS * first:  # also if it is not a number
        raise WrongResultError(
            f"it does not learn: the loss is {first:.3g} at the start and {last:.3g} after {GENERATIONS} "
            "generations"
        )


def search_peak_bytes(scheme: AbstractPeer, case: Case, seed: int) -> int:
    """Return by how many bytes two generations raise this process's resident memory at their peak.

    The process should be fresh. A generation of a small population comes first and is not counted: in it the
    library loads and compiles what it needs.

    Raises:
        UnavailableError: the system cannot reset a process's peak memory.
    """
    small = msgspec.structs.replace(case, members=2)
    y = classes(case.repeats // 2, "cpu", seed)
    x = inputs.normal(len(y), *input_shape(case), device="cpu", dtype=inputs.dtype_of(case), seed=seed)[0]
    scheme.search(task_of(small, "cpu", seed, y=y)).step(x)
    before_bytes = reset_peak()
    if before_bytes is None:
        raise UnavailableError("this system does not report the peak memory of a part of a process")
    search = scheme.search(task_of(case, "cpu", seed, y=y))
    for _ in range(2):
        search.step(x)
    return status_bytes("VmHWM") - before_bytes


build.register(AbstractPeer, PeerWorkload)
