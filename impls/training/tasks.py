"""Tasks that evolution strategies learn: two of gymnasium's environments, handwritten digits and a text.

Nothing here uses a global random generator.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor, nn
from typing_extensions import override

from esbench.errors import UserError, message_of
from esbench.schema import Task
from impls.perturbation.population import ActivationRecord, Population, PopulationNoise
from impls.training import networks

Array = NDArray[Any]
Module = TypeVar("Module", bound=nn.Module)
Fitness = tuple[Tensor, ActivationRecord | None]
"""The fitness of all members, [2, members], and the record for schemes that learn from rows, if any."""

TESTED = 100
"""Episodes of a test, from the same starts in every test."""
TEST_SEED = 1
TEXT = Path(__file__).with_name("genesis.txt")
"""Chapters 1, 5 and 11 of Genesis in the King James Version, in the public domain, a verse a line."""
CONTEXT, WIDTH, HEADS, HIDDEN = 8, 16, 2, 32
"""Characters that the transformer reads, and its sizes."""


class AbstractTask(ABC):
    """A network, how members are evaluated, and the score of the network.

    Attributes:
        task: the settings and the goal.
        learns_from_rows: whether schemes can be trained whose update needs the inputs of the layers.
    """

    task: Task
    learns_from_rows = True

    @abstractmethod
    def prepare(self) -> None:
        """Raise a UserError if a package or data is missing."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """Return the network with seeded weights, on the CPU."""

    @abstractmethod
    def fitness(self, population: Population, noise: PopulationNoise, batch: int, seed: int) -> Fitness:
        """Evaluate all members on ``batch`` episodes or rows, which the seed chooses."""

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """Return the score of a network."""


def cross_entropy_fitness(population: Population, noise: PopulationNoise, x: Tensor, y: Tensor) -> Fitness:
    """Return minus the mean cross-entropy of each member.

    Args:
        population: the population.
        noise: the noise of its members.
        x: the inputs, which each member sees: [batch, ...].
        y: their classes, int64 [batch] or [batch, positions].
    """
    logits, record = population.call_with_activations(population.rows(x, noise), noise=noise)
    classes = population.rows(y, noise)
    loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), classes.flatten(), reduction="none")
    return population.fitness(-loss.view(len(classes), -1).mean(1), noise), record


# Episodes


class Environments(Protocol):
    """Several copies of an environment that play at once."""

    name: str

    def __init__(self, episodes: Array) -> None:
        """Make an environment for each row; ``episodes`` numbers their episodes from 0, int64 [rows]."""

    def reset(self, seed: int) -> Array:
        """Start new episodes, which the seed chooses; return the observations, float32 [rows, features]."""

    def step(self, outputs: Array) -> tuple[Array, Array, Array]:
        """Take the outputs of the policy [rows, outputs]; return observations, rewards and ends [rows]."""


class CartPoles:
    """gymnasium's vector environment of CartPole-v1; the push is to the side of the larger output."""

    name = "CartPole-v1"

    def __init__(self, episodes: Array) -> None:
        """Make an environment for each row, with a start that no other row has."""
        self._environments = _gymnasium().make_vec(
            self.name, num_envs=len(episodes), vectorization_mode="vector_entry_point"
        )

    def reset(self, seed: int) -> Array:
        """Start new episodes."""
        return self._environments.reset(seed=seed)[0]

    def step(self, outputs: Array) -> tuple[Array, Array, Array]:
        """Push all carts."""
        observations, rewards, ended, truncated, _ = self._environments.step(outputs.argmax(1))
        return observations, rewards, ended | truncated


class Pendulums:
    """gymnasium's Pendulum-v1 with arrays as its state, whose equations then move all pendulums at once.

    gymnasium has no vector environment of it but a loop over environments, which is 50 times slower. The
    torque is the largest one times the tanh of the output.
    """

    name = "Pendulum-v1"

    def __init__(self, episodes: Array) -> None:
        """Make a pendulum for each row; rows of the same episode start in the same state."""
        self._environment = _gymnasium().make(self.name).unwrapped
        self._episodes = episodes

    def reset(self, seed: int) -> Array:
        """Start new episodes, with gymnasium's distribution of angles and speeds."""
        starts = np.random.default_rng(seed).uniform(
            (-math.pi, -1), (math.pi, 1), (1 + self._episodes.max(), 2)
        )
        angle, speed = self._environment.state = starts[self._episodes].T
        return np.stack([np.cos(angle), np.sin(angle), speed], 1).astype(np.float32)

    def step(self, outputs: Array) -> tuple[Array, Array, Array]:
        """Turn all pendulums."""
        torque = self._environment.max_torque * np.tanh(outputs)
        observations, rewards, *_ = self._environment.step(torque.T)
        return np.ascontiguousarray(observations.T), rewards, np.zeros(len(outputs), bool)


@torch.no_grad()
def play(
    environments: Environments,
    policy: Callable[[Tensor], Tensor],
    seed: int,
    steps: int,
    device: torch.device,
) -> Tensor:
    """Return the sum of the rewards of the first episode of each row, float32 [rows].

    It always takes ``steps`` time steps, so that its time does not depend on the policy.

    Raises:
        UserError: the environment raised an error, or a reward is not finite.
    """
    total: Array | None = None
    observations, runs = _call(environments.name, environments.reset, seed), None
    for number in range(steps):
        outputs = policy(torch.from_numpy(observations).to(device)).cpu().numpy()
        observations, rewards, ended = _call(environments.name, environments.step, outputs)
        if not np.isfinite(rewards).all():
            wrong = int((~np.isfinite(rewards)).sum())
            raise UserError(
                f"{environments.name}: {wrong} of {rewards.size} rewards are not finite in time step {number}"
            )
        total, runs = (rewards, ~ended) if runs is None else (total + rewards * runs, runs & ~ended)
    return torch.as_tensor(total, dtype=torch.float32)


def _call(name: str, method: Callable[..., Any], argument: object) -> Any:  # noqa: ANN401  as the method
    """Call an environment; raise a UserError with its name if it raises an error."""
    try:
        return method(argument)
    except Exception as error:
        reason = f"{type(error).__name__}: {message_of(error)}"
        raise UserError(f"the environment {name} raised {reason}") from error


def _gymnasium() -> Any:  # noqa: ANN401  optional
    try:
        import gymnasium  # noqa: PLC0415  optional
    except ModuleNotFoundError as error:
        raise UserError(
            "CartPole and Pendulum need gymnasium: pip install gymnasium, or choose others with --task"
        ) from error
    return gymnasium


class Control(AbstractTask):
    """A policy with 16 tanh units; the fitness of a member is the mean reward of its episodes."""

    learns_from_rows = False

    def __init__(
        self, task: Task, environments: type[Environments], sizes: tuple[int, int], steps: int
    ) -> None:
        """Store the task; ``sizes`` are the policy's inputs and outputs, ``steps`` those of an episode."""
        self.task, self._environments, self._sizes, self._steps = task, environments, sizes, steps
        self._made: dict[tuple[int, ...], Environments] = {}

    @override
    def prepare(self) -> None:
        self._environments(np.zeros(1, int))

    @override
    def model(self, seed: int) -> nn.Module:
        features, outputs = self._sizes
        return seeded(lambda: nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, outputs)), seed)

    @override
    def fitness(self, population: Population, noise: PopulationNoise, batch: int, seed: int) -> Fitness:
        # Every member plays each episode twice, with its noise and minus it.
        environments = self._make(2, batch, population.members)
        rows = 2 * batch * population.members
        device = next(population.model.parameters()).device
        policy = population.prepare(noise, torch.zeros(rows, self._sizes[0], device=device))
        return population.fitness(play(environments, policy, seed, self._steps, device)), None

    @override
    def score(self, model: nn.Module) -> float:
        device = next(model.parameters()).device
        return float(play(self._make(1, TESTED, 1), model, TEST_SEED, self._steps, device).mean())

    def _make(self, repeats: int, episodes: int, copies: int) -> Environments:
        """Return environments whose rows play episodes in this order: all copies, all episodes, repeated."""
        key = (repeats, episodes, copies)
        if key not in self._made:
            self._made[key] = self._environments(np.tile(np.arange(episodes).repeat(copies), repeats))
        return self._made[key]


# Images and text


class Images(AbstractTask):
    """A network of :mod:`impls.training.networks`, scored by its accuracy on the test images."""

    def __init__(self, task: Task) -> None:
        """Store the task, which has the name of its network."""
        self.task = task

    @override
    def prepare(self) -> None:
        networks.digits()

    @override
    def model(self, seed: int) -> nn.Module:
        return networks.untrained(self.task.name, seed)

    @override
    def fitness(self, population: Population, noise: PopulationNoise, batch: int, seed: int) -> Fitness:
        data, device = networks.digits(), next(population.model.parameters()).device
        rows = torch.randint(len(data.train_y), (batch,), generator=Generator().manual_seed(seed))
        x = networks.rows_for(population.model, data.train_x[rows]).to(device)
        return cross_entropy_fitness(population, noise, x, data.train_y[rows].to(device))

    @override
    def score(self, model: nn.Module) -> float:
        return 100 * networks.accuracy(model)


class Transformer(nn.Module):
    """Predicts each next character from at most CONTEXT before it: characters [rows, CONTEXT], one layer.

    A mask adds minus the distance to the attention, as in ALiBi (arXiv:2108.12409), and hides a position
    from itself: the residual connection has it.
    """

    mask: Tensor

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(CONTEXT, WIDTH))
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, characters)
        distance = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)
        mask = torch.where(distance > 0, -distance.float(), -torch.inf)
        mask[0, 0] = 0.0  # the first position has no other one
        self.register_buffer("mask", mask)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.embedding(x) + self.position, src_mask=self.mask))
        return y


class Text(AbstractTask):
    """A transformer that predicts the next character of a text, scored in bits per character.

    The score is the mean over the text; each prediction has at least half the context.
    """

    def __init__(self, task: Task) -> None:
        """Store the task."""
        self.task = task

    @override
    def prepare(self) -> None:
        characters()

    @override
    def model(self, seed: int) -> nn.Module:
        counts = torch.bincount(characters())
        model = seeded(lambda: Transformer(len(counts)), seed)
        with torch.no_grad():
            model.head.bias.copy_((counts / counts.sum()).log())  # how frequent each character is
        return model

    @override
    def fitness(self, population: Population, noise: PopulationNoise, batch: int, seed: int) -> Fitness:
        windows = characters().unfold(0, CONTEXT + 1, 1)
        rows = torch.randint(len(windows), (batch,), generator=Generator().manual_seed(seed))
        chosen = windows[rows].to(next(population.model.parameters()).device)
        return cross_entropy_fitness(population, noise, chosen[:, :-1], chosen[:, 1:])

    @override
    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        half = CONTEXT // 2
        windows = characters().unfold(0, CONTEXT + 1, half).to(next(model.parameters()).device)
        logits = model(windows[:, :-1])[:, half:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, half + 1 :].flatten())
        return float(loss) / math.log(2)


@cache
def characters() -> Tensor:
    """Return the text in lower case as the indices of its characters in the alphabet, int64."""
    text = TEXT.read_text(encoding="utf-8").lower()
    alphabet = {character: index for index, character in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[character] for character in text])


@cache
def bigram_entropy() -> float:
    """Return the entropy of a character given the one before it in the text, in bits.

    No predictor that sees one character has a lower score on this text.
    """
    text = characters().tolist()
    pairs, firsts = Counter(pairwise(text)), Counter(text[:-1])
    return -sum(count * math.log2(count / firsts[first]) for (first, _), count in pairs.items()) / (
        len(text) - 1
    )


def seeded(make: Callable[[], Module], seed: int) -> Module:
    """Return a module whose weights are drawn with a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


TASKS: Mapping[str, AbstractTask] = MappingProxyType(
    {
        task.task.name: task
        for task in (
            Control(
                Task(
                    name="CartPole",
                    members=32,
                    batch=1,
                    sigma=0.2,
                    learning_rate=0.05,
                    steps=150,
                    every=2,
                    score="mean reward",
                    goal=475.0,
                    rises=True,
                    tests=f"a policy 4-16-2 in gymnasium's CartPole-v1; the mean reward of {TESTED} episodes",
                ),
                CartPoles,
                (4, 2),
                500,
            ),
            Control(
                Task(
                    name="Pendulum",
                    members=32,
                    batch=4,
                    sigma=0.2,
                    learning_rate=0.1,
                    steps=250,
                    every=5,
                    score="mean reward",
                    goal=-250.0,
                    rises=True,
                    tests=f"a policy 3-16-1 in gymnasium's Pendulum-v1; the mean reward of {TESTED} episodes",
                ),
                Pendulums,
                (3, 1),
                200,
            ),
            Images(
                Task(
                    name="DigitsCNN",
                    members=128,
                    batch=16,
                    sigma=0.1,
                    learning_rate=0.05,
                    steps=200,
                    every=4,
                    score="accuracy (%)",
                    goal=80.0,
                    rises=True,
                    tests="two convolutions and a linear layer; the accuracy on 360 test images",
                )
            ),
            Text(
                Task(
                    name="Characters",
                    members=512,
                    batch=8,
                    sigma=0.05,
                    learning_rate=0.02,
                    steps=300,
                    every=10,
                    score="bits per character",
                    goal=round(bigram_entropy(), 3),
                    rises=False,
                    tests=(
                        "a transformer of one layer on chapters of Genesis; bits per character of the text, "
                        "with its bigram entropy as the goal"
                    ),
                )
            ),
        )
    }
)
"""The tasks by name."""
