"""When connections move, how many, and how many each layer has: by hand from the paper's formulas."""

from typing import Any

import pytest
import torch
from torch import nn

from impls.training.rigl import RigLScheduler
from impls.training.schedule import Schedule
from impls.training.sparsity import erk, sparsifiable, zeros
from tests.rigl_cases import network


@pytest.mark.parametrize(
    ("begin", "end", "delta", "expected"),
    [
        (0, 75, 5, list(range(5, 75, 5))),
        (0, 76, 5, list(range(5, 80, 5))),
        (10, 40, 10, [10, 20, 30]),
        (10, 41, 10, [10, 20, 30, 40]),
        (3, 20, 4, [3, 7, 11, 15, 19]),
        (7, 8, 100, [7]),
        (1, 4, 1, [1, 2, 3]),
    ],
)
def test_connections_move_every_delta_steps_from_begin_until_before_the_end(
    begin: int, end: int, delta: int, expected: list[int]
) -> None:
    """With delta 5 and T_end 75 at 5, 10, ..., 70; never at step 0, where nothing is known yet."""
    schedule = Schedule(0.1, end, delta, begin=begin)
    assert [step for step in range(100) if schedule.updates_at(step)] == expected


def test_static_connections_never_move() -> None:
    """Whatever the other settings say, and without an end."""
    assert not any(Schedule(0.1, 75, 5, static_topo=True).updates_at(step) for step in range(100))
    assert not any(Schedule(0.1, None, static_topo=True).updates_at(step) for step in range(1000))


@pytest.mark.parametrize(("begin", "end", "delta"), [(0, 5, 5), (0, 5, 100), (7, 7, 1), (9, 7, 1)])
def test_connections_that_could_never_move_are_warned_of(begin: int, end: int, delta: int) -> None:
    """Unless that was asked for, or there are none but these; one step more, and there is an update."""
    with pytest.warns(RuntimeWarning, match=rf"never move: .* at step {begin or delta}, .* T_end {end} on"):
        schedule = Schedule(0.1, end, delta, begin=begin)
    assert not any(map(schedule.updates_at, range(200)))
    Schedule(0.1, end, delta, begin=begin, static_topo=True)
    Schedule(1.0, end, delta, begin=begin)
    later = Schedule(0.1, (begin or delta) + 1, delta, begin=begin)
    assert sum(map(later.updates_at, range(200))) == 1


def test_the_warning_names_the_line_that_made_the_scheduler() -> None:
    """That is where the steps are to be mended."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.warns(RuntimeWarning, match="never move") as caught:
        RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=75)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("begin", "step", "fraction"),
    [
        # By alpha / 2 (1 + cos(pi t / T)) with alpha 0.3: cos(pi / 3) is 1/2.
        *[(0, 0, 0.3), (0, 25, 0.225), (0, 37.5, 0.15), (0, 50, 0.075), (0, 75, 0.0), (0, 80, 0.0)],
        # From 15 to 75 are 60 steps, of which 20 are a third, and 10 a sixth: cos(pi / 6) is sqrt(3) / 2.
        *[
            (15, 10, 0.3),
            (15, 15, 0.3),
            (15, 25, 0.279903811),
            (15, 35, 0.225),
            (15, 45, 0.15),
            (15, 55, 0.075),
        ],
        *[(15, 75, 0.0), (74, 74, 0.3), (75, 75, 0.0), (80, 80, 0.0)],
    ],
)
@pytest.mark.filterwarnings("ignore:connections will never move")
def test_the_share_that_moves_falls_as_a_cosine(begin: int, step: int, fraction: float) -> None:
    """From alpha at the beginning to nothing at the end, in proportion to alpha."""
    for alpha in (0.3, 0.6):
        found = Schedule(0.1, 75, 5, alpha=alpha, begin=begin).fraction(step)
        assert found == pytest.approx(alpha / 0.3 * fraction, abs=1e-9)


@pytest.mark.parametrize(("n", "expected"), [(1, [4, 9]), (2, [3, 4, 8, 9]), (4, [1, 2, 3, 4, 6, 7, 8, 9])])
def test_dense_gradients_are_gathered_just_before_an_update(n: int, expected: list[int]) -> None:
    """Behind 4 steps comes the backward pass of step 5, at which connections move."""
    schedule = Schedule(0.1, 11, 5, grad_accumulation_n=n)
    assert [step for step in range(20) if schedule.gathers_after(step)] == expected
    drawn = Schedule(0.1, 11, 5, grad_accumulation_n=n, growth="random")
    assert not any(map(drawn.gathers_after, range(20)))


@pytest.mark.parametrize(
    ("shapes", "density", "expected"),
    [
        # 192 + 256 + 138 is the sum of dimensions, 25856 that of products: 0.1 * 25856 / 586 = 4.41229
        ([(128, 64), (128, 128), (10, 128)], 0.1, [0.103413, 0.068942, 0.475700]),
        # 22.06 * 138 / 1280 is above 1: the last is dense, and (12928 - 1280) / 448 = 26 is left
        ([(128, 64), (128, 128), (10, 128)], 0.5, [0.609375, 0.40625, 1.0]),
        # a kernel's sides count as dimensions: 73 / 1728 and 134 / 36864 by 3859.2 / 207
        ([(64, 3, 3, 3), (64, 64, 3, 3)], 0.1, [0.787602, 0.067769]),
        ([(4, 4), (4, 4)], 1.0, [1.0, 1.0]),
        ([(10, 10)], 0.3, [0.3]),
        ([(2, 2), (2, 2)], 0.99, [0.99, 0.99]),
    ],
)
def test_erk_gives_small_layers_more(
    shapes: list[tuple[int, ...]], density: float, expected: list[float]
) -> None:
    """In proportion to the sum of a layer's dimensions by their product, and none more than all."""
    found = erk(shapes, density)
    assert found == pytest.approx(expected, rel=1e-5)
    sizes = [torch.Size(shape).numel() for shape in shapes]
    kept = sum(one * size for one, size in zip(found, sizes, strict=True))
    assert kept == pytest.approx(density * sum(sizes))


@pytest.mark.parametrize("density", [0.05, 0.1, 0.33, 0.9])
def test_so_many_entries_are_zero_as_the_sparsity_says_rounded_down(density: float) -> None:
    """floor((1 - density) n) of each; with uniform the first of several layers stays dense."""
    found = zeros(sparsifiable(network()), density)
    assert [one.zeros for one in found] == [0, int((1 - density) * 24 * 16), int((1 - density) * 16 * 6)]
    (alone,) = zeros(sparsifiable(nn.Linear(7, 9)), density)
    assert alone.zeros == int((1 - density) * 63)
    assert alone.kept == 63 - alone.zeros


@pytest.mark.parametrize(
    ("density", "expected"),
    [(0.9, 10), (0.7, 30), (0.8, 20), (0.4, 60), (0.1, 90), (1 - 0.9, 90), (1 - 0.7, 70), (1 / 3, 66)],
)
@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_the_number_of_zeros_is_exact(density: float, expected: int, distribution: Any) -> None:
    """Decimals are meant as they are written, though 1 - 0.9 is less than 0.1 to a computer."""
    (alone,) = zeros(sparsifiable(nn.Linear(10, 10)), density, distribution)
    assert alone.zeros == expected
    first, second = zeros(sparsifiable(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))), density, "erk")
    assert first.zeros == second.zeros == expected


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_entries_are_none() -> None:
    """There is nothing to make sparse in them, and nothing to be said about them."""
    for distribution in ("uniform", "erk"):
        model = nn.Sequential(nn.Linear(8, 0), nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(0, 8))
        optimizer = torch.optim.SGD(model.parameters())
        settings: Any = {"dense_allocation": 0.5, "sparsity_distribution": distribution}
        text = str(RigLScheduler(model, optimizer, T_end=75, delta=3, **settings))
        assert "1.weight" in text
        assert "0.weight" not in text
    with pytest.raises(ValueError, match="no linear or convolutional layer"):
        zeros(sparsifiable(nn.Linear(8, 0)), 0.5)


def test_norms_embeddings_and_biases_are_never_sparse() -> None:
    """Nor is a weight that an embedding shares, that does not learn, or that is computed from others."""
    model = network()
    assert list(sparsifiable(model)) == ["2.weight", "5.weight", "7.weight"]
    tied = nn.ModuleDict({"words": nn.Embedding(9, 4), "scores": nn.Linear(4, 9), "plain": nn.Linear(4, 4)})
    tied["scores"].weight = tied["words"].weight
    assert list(sparsifiable(tied)) == ["plain.weight"]
    model.get_submodule("5").requires_grad_(requires_grad=False)
    assert list(sparsifiable(model)) == ["2.weight", "7.weight"]
    nn.utils.parametrizations.weight_norm(model.get_submodule("7"))
    assert list(sparsifiable(model)) == ["2.weight"]


def test_a_weight_of_two_layers_is_sparse_once() -> None:
    """It keeps the name that it has first."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    assert list(sparsifiable(nn.Sequential(first, nn.Tanh(), second, first))) == ["0.weight"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"ignore": ["1"]}, ["0.weight", "2.0.weight"]),
        ({"ignore": ["2"]}, ["0.weight", "1.weight"]),
        ({"ignore": "2.0"}, ["0.weight", "1.weight"]),  # and neither 2 nor 0
        ({"ignore": ["2.0.weight"]}, ["0.weight", "1.weight"]),
        ({"ignore_linear_layers": True}, ["0.weight"]),
    ],
)
def test_layers_can_be_left_dense(settings: dict[str, Any], expected: list[str]) -> None:
    """By name, with all that is below it, or every linear one; convolutions are sparse too."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 2)))
    assert list(sparsifiable(model, **settings)) == expected


def test_a_name_to_be_ignored_must_be_one_of_the_models() -> None:
    """The message lists those that are."""
    with pytest.raises(ValueError, match=r"the model has no 9, head; it has 0, 0\.weight"):
        sparsifiable(network(), ignore=["head", "9"])


def test_a_layer_without_a_shape_is_refused() -> None:
    """Nobody knows yet how many of its entries would be zero."""
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        sparsifiable(nn.Sequential(nn.LazyLinear(4)))
