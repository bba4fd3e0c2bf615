"""EvoX: OpenES on its supervised learning problem, eager and compiled, and its VirtualES."""

import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.peers.networks import MLP, OPERATORS
from impls.benchmark.peers.workload import (
    AbstractLibrary,
    AbstractSearch,
    Task,
    cross_entropy,
)
from impls.benchmark.training.workload import check_supported

VIRTUAL_MEMBERS = 256
"""The most evaluations of VirtualES on a CPU."""


class CenteredRanks(nn.Module):
    """Shapes losses: EvoX has none, but takes a module as ``fitness_transform``."""

    @override
    def forward(self, losses: Tensor) -> Tensor:
        ranks = torch.empty_like(losses)
        ranks[losses.argsort()] = torch.arange(len(losses), dtype=losses.dtype, device=losses.device)
        return ranks / (len(losses) - 1) - 0.5


class CrossEntropy(nn.Module):
    """The cross-entropy of each row, as a module."""

    @override
    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(logits, y, reduction="none")


class EvoxSearch(AbstractSearch):
    """A standard workflow of an algorithm, a problem and transforms."""

    def __init__(self, scheme: "Evox", task: Task) -> None:
        algorithms, problems, supervised, core, utils, workflows = scheme.modules(
            "evox.algorithms",
            "evox.problems.neuroevolution",
            "evox.problems.neuroevolution.supervised_learning",
            "evox.core",
            "evox.utils",
            "evox.workflows",
        )
        adapter = utils.ParamsAndVector(task.model)
        start = adapter.to_vector(dict(task.model.named_parameters())).detach()
        device = start.device
        # A step writes its batch into these, which compiled code expects in one place.
        self._batch = (torch.empty(len(task.y), *task.input_shape, device=device), task.y)
        data: dict[str, Any] = {"n_batch_per_eval": -1, "device": device}
        criterion = CrossEntropy()
        options: dict[str, Any] = {"learning_rate": task.learning_rate, "noise_stdev": task.sigma}
        if scheme.algorithm == "OpenES":
            algorithm = algorithms.OpenES(task.population, start, device=device, **options)
            problem = supervised.SupervisedLearningProblem(
                task.model, (self._batch,), criterion, pop_size=task.population, **data
            )
        else:
            shapes = [tuple(parameter.shape) for parameter in task.model.parameters()]
            algorithm = algorithms.VirtualES(shapes, task.population, start, device=device, **options)
            problem = problems.VirtualProblem(task.model, (self._batch,), criterion, **data)
            adapter = None
        self._workflow = workflows.StdWorkflow(
            algorithm,
            problem,
            solution_transform=adapter,
            fitness_transform=CenteredRanks(),
            device=device,
        )
        torch.manual_seed(task.seed)
        # The first step is init_step(), which for these algorithms is step().
        take_step = self._workflow.step
        # On a CPU the compiler's own random numbers take longer than all the rest of a generation.
        options = {"fallback_random": device.type == "cpu"}
        self._take_step = core.compile(take_step, options=options) if scheme.compiled else take_step

    @override
    def step(self, x: Tensor) -> Tensor:
        self._batch[0].copy_(x)
        limit = sys.getrecursionlimit()
        self._take_step()
        sys.setrecursionlimit(limit)  # torch's compiler raises it
        return self.center()

    @override
    def center(self) -> Tensor:
        center: Tensor = self._workflow.algorithm.center
        return center


@variant(
    operators=OPERATORS,
    version="1.4.0",
    algorithm="VirtualES",
    source="https://evox.readthedocs.io/en/stable/apidocs/evox/evox.algorithms.so.es_variants.html",
)
@variant(
    operators=OPERATORS,
    version="1.4.0",
    compiled=(False, True),
    source="https://evox.readthedocs.io/en/stable/examples/supervised_learning.html",
)
@dataclass(frozen=True)
class Evox(AbstractLibrary):
    """OpenES with mirrored sampling and SGD, or VirtualES, which draws its noise in kernels and has no pairs.

    ``compiled``: the workflow's step is compiled by EvoX's ``compile``.
    """

    NAME: ClassVar[str] = "evox"
    DTYPES: ClassVar[tuple[str, ...]] = ("float32",)  # its algorithms draw float32
    algorithm: str = "OpenES"
    compiled: bool = False

    @override
    def search(self, task: Task) -> AbstractSearch:
        is_fast = self.algorithm == "OpenES" or task.y.is_cuda or task.population <= VIRTUAL_MEMBERS
        reason = f"without a GPU its noise takes seconds: measured up to {VIRTUAL_MEMBERS} evaluations"
        check_supported(is_fast, reason)
        is_mlp = self.algorithm == "OpenES" or task.operator == MLP
        check_supported(is_mlp, "VirtualProblem takes linear layers and activations only")
        return EvoxSearch(self, task)

    @override
    def effective_members(self, task: Task, x: Tensor) -> float:
        return float(task.pairs if self.algorithm == "OpenES" else task.population)
