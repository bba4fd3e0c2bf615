"""The tasks of the study of tasks: their environments, their networks and their scores."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from esbench.errors import UserError
from esbench.workload import UnavailableError
from impls import DropoutMask, LowRank, Perturbed, perturb
from impls.training import tasks
from impls.training.evolution import PopulationTrainer
from impls.training.tasks import TASKS, Array, CartPoles, Control, Pendulums, Text, play

CPU = torch.device("cpu")
DENSE = Perturbed()


class Line:
    """Environments that reward an output near the observation; the first row ends early."""

    name = "Line"

    def __init__(self, episodes: Array) -> None:
        self.episodes, self.fault = episodes, math.inf

    def reset(self, seed: int) -> Array:
        """Return the position of each row's episode."""
        self.position = np.linspace(-1, 1, 1 + self.episodes.max())[self.episodes] * (-1) ** seed
        self.time = 0
        return self.position[:, None].astype(np.float32)

    def step(self, outputs: Array) -> tuple[Array, Array, Array]:
        """Return rewards, which are wrong or missing from the time ``fault`` on."""
        self.time += 1
        rewards = -np.abs(outputs[:, 0] - self.position)
        if self.time >= self.fault:
            rewards[0] = math.nan
        if self.time > self.fault:
            raise ValueError("the line\nbroke")
        ended = np.zeros(len(outputs), bool)
        ended[0] = self.time == 2
        return self.position[:, None].astype(np.float32), rewards, ended


def zero(x: Tensor) -> Tensor:
    """Return the output 0 for each row."""
    return torch.zeros(len(x), 1)


def test_an_episode_ends_for_good_and_faults_of_an_environment_have_its_name() -> None:
    """Rewards after the end are not counted; NaN and an error are one line."""
    line = Line(np.arange(3))
    assert play(line, zero, 0, 5, CPU).tolist() == [-2, 0, -5]
    line.fault = 2
    with pytest.raises(UserError, match="Line: 1 of 3 rewards are not finite in time step 1"):
        play(line, zero, 0, 5, CPU)
    line.fault = 0
    with pytest.raises(UserError, match="the environment Line raised ValueError: the line broke"):
        play(line, zero, 0, 5, CPU)


def test_a_policy_learns_and_both_sides_of_a_pair_play_the_same_episodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The score rises within some steps; schemes that learn from rows are refused."""
    line = Control(TASKS["Pendulum"].task, Line, (1, 1), 3)
    monkeypatch.setattr(tasks, "TASKS", {"Pendulum": line})
    monkeypatch.setattr("impls.training.evolution.TASKS", {"Pendulum": line})
    trainer = PopulationTrainer()
    (task,) = trainer.tasks()
    training = trainer.begin(LowRank(rank=1), task, 0, "cpu")
    first = training.score()
    for step in range(20):
        training.step(step)
    assert training.score() > first / 2
    assert isinstance(made := line._make(2, 3, 2), Line)
    assert made.episodes.tolist() == [0, 0, 1, 1, 2, 2] * 2
    with pytest.raises(UnavailableError, match="which a rollout does not keep"):
        trainer.begin(DropoutMask(0.5, "out"), task, 0, "cpu")


def test_pendulums_move_as_gymnasium_moves_each() -> None:
    """Arrays as the state of one environment give the numbers of separate environments."""
    gymnasium = pytest.importorskip("gymnasium", reason="the group tasks is not installed")
    many = Pendulums(np.array([0, 1, 0]))
    observations = many.reset(3)
    assert (observations[0] == observations[2]).all()
    outputs = np.array([[0.1], [-2.0], [0.5]], np.float32)
    for row, output in enumerate(outputs):
        one = gymnasium.make("Pendulum-v1").unwrapped
        one.reset()
        one.state = np.array(
            [math.atan2(observations[row, 1], observations[row, 0]), observations[row, 2]], np.float64
        )
        expected, reward, *_ = one.step(2 * np.tanh(output))
        many.reset(3)
        moved, rewards, ended = many.step(outputs)
        assert moved[row] == pytest.approx(expected, abs=1e-5)
        assert rewards[row] == pytest.approx(reward, abs=1e-5)
        assert not ended.any()


def test_a_cart_pole_is_gymnasiums() -> None:
    """A policy that always pushes to one side falls after about ten steps."""
    pytest.importorskip("gymnasium", reason="the group tasks is not installed")
    poles = CartPoles(np.arange(4))
    rewards = play(poles, lambda x: torch.eye(2)[torch.zeros(len(x), dtype=torch.long)], 0, 30, CPU)
    assert ((rewards > 5) & (rewards < 15)).all()


def test_the_transformer_sees_only_earlier_characters() -> None:
    """A later character changes no earlier prediction, and a population of it is verified."""
    model = TASKS["Characters"].model(0)
    x = tasks.characters()[: 4 * tasks.CONTEXT].view(4, tasks.CONTEXT)
    changed = x.clone()
    changed[:, 5] = (x[:, 5] + 1) % 30
    with torch.no_grad():
        y, z = model(x), model(changed)
    assert torch.equal(y[:, :5], z[:, :5])
    assert (y[:, 5:] != z[:, 5:]).any(-1).all()
    population = perturb(model, DENSE, members=3, sigma=0.1, antithetic=True)
    population.verify(population.rows(x))


def test_bigram_entropy_is_the_best_score_from_one_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """The goal of Characters is the entropy of the shipped text, and scores are bits per character."""
    assert TASKS["Characters"].task.goal == pytest.approx(tasks.bigram_entropy(), abs=1e-3)
    assert len(tasks.TEXT.read_text()) > 10_000
    text = torch.tensor([0, 1, 0, 2] * 100 + [0])  # after 0 comes 1 or 2: one bit every other time
    monkeypatch.setattr(tasks, "characters", lambda: text)
    tasks.bigram_entropy.cache_clear()
    assert tasks.bigram_entropy() == pytest.approx(0.5)
    tasks.bigram_entropy.cache_clear()
    assert isinstance(task := TASKS["Characters"], Text)
    uniform = torch.nn.Module()
    uniform.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
    uniform.forward = lambda x: torch.zeros(*x.shape, 8)
    assert task.score(uniform) == pytest.approx(3)


@pytest.mark.parametrize("name", ["DigitsCNN", "Characters"])
def test_a_training_run_is_a_function_of_its_seed(name: str) -> None:
    """Equal seeds give equal scores, other seeds others; no global generator is used."""
    state, trainer = torch.get_rng_state(), PopulationTrainer()
    task = next(task for task in trainer.tasks() if task.name == name)
    scores = []
    for seed in (0, 0, 1):
        training = trainer.begin(LowRank(rank=1), task, seed, "cpu")
        training.step(0)
        scores.append(training.score())
    assert scores[0] == scores[1]
    assert scores[0] != scores[2]
    assert torch.equal(state, torch.get_rng_state())
