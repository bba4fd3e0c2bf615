"""Which backward passes say what is to grow, and closures that optimizers evaluate inside their step."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from impls.training.rigl import RigLScheduler
from tests.rigl_cases import STEPS, Training, equal, masks, rows, weights

SETTINGS: dict[str, Any] = {
    "dense_allocation": 0.2,
    "T_end": 25,
    "delta": 5,
    "sparsity_distribution": "erk",
}
SEARCHES: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"_momentum": 0.9}),
    (torch.optim.LBFGS, {"_lr": 1.0, "_max_iter": 4}),
    (torch.optim.LBFGS, {"_lr": 1.0, "_max_iter": 4, "_line_search_fn": "strong_wolfe"}),
]
any_search = pytest.mark.parametrize(("optimizer", "settings"), SEARCHES, ids=["sgd", "lbfgs", "wolfe"])


def dense(training: Training, step: int) -> list[Tensor]:
    """Return the dense gradients of a step for each sparse weight, without touching them."""
    twin = copy.deepcopy(training.model)
    wanted = [twin.get_parameter(layer.name) for layer in training.scheduler.layers]
    return list(torch.autograd.grad(twin(rows(step)).square().mean(), wanted))


def gathered(training: Training) -> list[tuple[Tensor, Tensor | None]]:
    """Return how many backward passes count by now, and the sum of their dense gradients."""
    return [(one.passes, one.gathered) for one in training.scheduler.layers]


def check_gathered(training: Training, passes: int, total: list[Tensor]) -> None:
    """Hold the gathered gradients to those that should have been."""
    for (count, found), expected in zip(gathered(training), total, strict=True):
        assert count == passes
        torch.testing.assert_close(found, expected)


@any_search
@pytest.mark.parametrize("calls_first", [True, False])
def test_closures_work(optimizer: Any, settings: dict[str, Any], calls_first: bool) -> None:
    """Called by the user first, or by the optimizer alone; no evaluation finds what is not connected."""
    training = Training(optimizer, **settings)
    moved, old = [], masks(training.scheduler)

    def closure(step: int) -> Tensor:
        assert all(not layer.weight[~layer.mask].any() for layer in training.scheduler.layers)
        return training.backward(step)

    for step in range(STEPS):
        if calls_first:
            training.backward(step)
        if training.scheduler():
            training.optimizer.step(partial(closure, step))
        else:
            moved.append(step + 1)
        for layer in training.scheduler.layers:
            assert int(layer.mask.sum()) == layer.kept
            assert not layer.weight[~layer.mask].any()
    assert moved == [5, 10, 15, 20]
    assert not any(map(torch.equal, masks(training.scheduler), old))
    assert all(one.isfinite().all() for one in weights(training))


@any_search
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("by_name", [True, False])
def test_evaluations_do_not_count_beside_backward_passes(
    optimizer: Any, settings: dict[str, Any], n: int, by_name: bool
) -> None:
    """What is to grow says the mean over the last steps' own passes, however often a closure is evaluated."""
    training = Training(optimizer, grad_accumulation_n=n, **settings)
    total = [torch.zeros_like(layer.weight) for layer in training.scheduler.layers]
    for step in range(5):
        if step >= 5 - n:
            total = [one + other for one, other in zip(total, dense(training, step), strict=True)]
        training.backward(step)
        if step < 4:
            training.scheduler()
            closure: Any = partial(training.backward, step)
            _ = training.optimizer.step(closure=closure) if by_name else training.optimizer.step(closure)
    check_gathered(training, n, total)
    assert all(layer.coming is None for layer in training.scheduler.layers)  # none is held twice


@pytest.mark.parametrize("n", [1, 3])
def test_evaluations_count_where_there_are_no_other_passes(n: int) -> None:
    """The first of each of the last steps, behind which the weights have not been moved by a line search."""
    training = Training(torch.optim.LBFGS, grad_accumulation_n=n, _lr=1.0, _max_iter=4)
    total = [torch.zeros_like(layer.weight) for layer in training.scheduler.layers]
    for step in range(4):
        if step >= 4 - n:
            total = [one + other for one, other in zip(total, dense(training, step), strict=True)]
        training.scheduler()
        training.optimizer.step(partial(training.backward, step))
    check_gathered(training, n, total)


def test_a_closure_that_raises_leaves_no_trace() -> None:
    """The next backward pass counts as any other does."""
    training = Training()
    training.run(last=4)
    with pytest.raises(ZeroDivisionError):
        training.optimizer.step(lambda: 1 / 0)
    expected = dense(training, 4)
    training.backward(4)
    check_gathered(training, 1, expected)


def test_gradients_that_are_not_added_up_do_not_count() -> None:
    """Those of torch.autograd.grad are dense, as they are, and say nothing about what is to grow."""
    training = Training()
    training.run(last=4)
    expected, other = dense(training, 4), dense(training, 7)
    wanted = [layer.weight for layer in training.scheduler.layers]
    for _ in range(2):
        assert equal(list(torch.autograd.grad(training.model(rows(7)).square().mean(), wanted)), other)
    assert [(int(passes), found) for passes, found in gathered(training)] == [(0, None)] * 3
    training.backward(4)
    torch.autograd.grad(training.model(rows(7)).square().mean(), wanted)
    check_gathered(training, 1, expected)


@pytest.mark.parametrize("forgets", ["update", "made"])
def test_lbfgs_forgets_its_history_when_connections_change(forgets: str) -> None:
    """Its next step is bitwise that of one without a past; between updates it keeps what it knows."""
    settings: dict[str, Any] = {"lr": 1.0, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    training = Training(torch.optim.LBFGS, **{f"_{name}": one for name, one in settings.items()})

    def take(optimizer: torch.optim.Optimizer, step: int) -> None:
        closure: Any = partial(training.backward, step)
        optimizer.step(closure)

    for step in range(4):
        take(training.optimizer, step)
        training.scheduler()
    assert any("old_dirs" in one for one in training.optimizer.state.values())
    if forgets == "update":
        training.backward(4)
        assert not training.scheduler()
    else:
        training.scheduler.close()
        training.scheduler = RigLScheduler(training.model, training.optimizer, seed=5, **SETTINGS)
    start = copy.deepcopy(training.model.state_dict())
    take(training.optimizer, 5)
    expected = weights(training)
    training.model.load_state_dict(start)
    take(torch.optim.LBFGS(training.model.parameters(), **settings), 5)
    assert equal(weights(training), expected)


def test_a_history_of_other_connections_moves_none_that_are_not_there() -> None:
    """Where a state was loaded and the optimizer's was not: no evaluation finds what is not connected."""
    training = Training(torch.optim.LBFGS, _lr=1.0, _max_iter=4)
    training.optimizer.step(partial(training.backward, 0))
    training.scheduler.load_state_dict(Training(drawn=5).scheduler.state_dict())
    seen: list[bool] = []

    def closure() -> Tensor:
        seen.extend(bool(layer.weight[~layer.mask].any()) for layer in training.scheduler.layers)
        return training.backward(1)

    step: Any = training.optimizer.step
    step(closure)
    assert len(seen) > 3
    assert not any(seen)


def test_a_resumed_lbfgs_keeps_its_history() -> None:
    """Cut between two updates: its past is of the same connections."""
    made: Any = partial(Training, torch.optim.LBFGS, _lr=1.0, _max_iter=4)
    straight, first, second = made(), made(), made(seed=4, drawn=4)

    def run(training: Training, begin: int, end: int) -> None:
        for step in range(begin, end):
            training.backward(step)
            if training.scheduler():
                training.optimizer.step(partial(training.backward, step))

    run(straight, 0, 13)
    run(first, 0, 8)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    run(second, 8, 13)
    assert equal(weights(second), weights(straight))
    assert equal(masks(second.scheduler), masks(straight.scheduler))
