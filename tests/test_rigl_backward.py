"""RigL inside the backward pass: the same training, one gradient at a time, and what it refuses."""

import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impls.training.backward import BackwardError, OptimizerInBackward, check_optimizer
from impls.training.connections import slots
from impls.training.optimizer import Rule
from impls.training.rigl import RigLScheduler
from impls.training.rigl_backward import RigLInBackward
from tests.rigl_cases import Training, equal, network, rows

SETTINGS: dict[str, Any] = {
    "dense_allocation": 0.2,
    "T_end": 25,
    "delta": 5,
    "sparsity_distribution": "erk",
}
RULE: Rule = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def backward(model: nn.Module, step: int) -> None:
    """Make the backward pass of a step."""
    model(rows(step)).square().mean().backward()


def held(training: RigLInBackward) -> list[Tensor]:
    """Return copies of the masks, weights and slots of each layer."""
    layers = [(one.mask, one.weight, *slots(training.optimizer, one.weight)) for one in training.layers]
    return [one.detach().clone() for layer in layers for one in layer]


@pytest.mark.parametrize(
    "rule",
    [RULE, partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.Adam, lr=0.01, eps=0.0)],
    ids=["momentum", "adamw", "0 / 0"],
)
def test_training_is_that_of_the_scheduler(rule: Rule) -> None:
    """Bitwise: the same connections move at the same steps, and weights are the same after all of them."""
    inside, outside = network(), network()
    training = RigLInBackward(inside, rule, **SETTINGS)
    optimizer = rule(list(outside.parameters()))
    scheduler = RigLScheduler(outside, optimizer, **SETTINGS)
    for step in range(30):
        backward(inside, step)
        optimizer.zero_grad()
        backward(outside, step)
        if taken := scheduler():
            optimizer.step()
        assert training() is taken
        assert all(one.grad is None for one in inside.parameters())
        theirs = ((one.mask, one.weight, *slots(optimizer, one.weight)) for one in scheduler.layers)
        assert equal(held(training), [one.detach() for layer in theirs for one in layer])
    assert equal([*inside.state_dict().values()], [*outside.state_dict().values()])
    check_optimizer(inside, training.optimizer)


def test_learning_rates_are_those_of_a_scheduler() -> None:
    """At a rate of 0 weights stay as they are; no step of it is lost where connections move."""
    model = network()
    training = RigLInBackward(model, RULE, **SETTINGS)
    rates = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: float(step < 7))
    for step in range(9):
        before = held(training)
        backward(model, step)
        training()
        rates.step()
        weights = slice(1, None, 3)
        assert equal(held(training)[weights], before[weights]) is (step >= 7)


def test_with_all_connections_every_step_trains() -> None:
    """There is nothing to move, and no step is lost to it."""
    model = network()
    training = RigLInBackward(model, RULE, **SETTINGS | {"dense_allocation": 1.0})
    for step in range(6):
        before = [one.detach().clone() for one in model.parameters()]
        backward(model, step)
        assert training()
        assert not equal([one.detach() for one in model.parameters()], before)


@pytest.mark.parametrize("step", [2, 4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_leaves_its_layer_as_it_was(step: int, bad: float) -> None:
    """Weights, slots and masks, at a step that trains and at one that moves connections; the others go on."""
    model = network()
    training = RigLInBackward(model, RULE, **SETTINGS)
    for earlier in range(step):
        backward(model, earlier)
        training()
    before = held(training)
    (first, *_) = training.layers
    place = (~first.mask).nonzero()[0].tolist()  # what is not connected counts as well

    def spoil(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[tuple(place)] = bad
        return gradient

    handle = first.weight.register_hook(spoil)
    backward(model, step)
    if step == 4:
        with pytest.warns(
            RuntimeWarning, match=r"step 5: nothing moved in 2\.weight: gradients that are not"
        ):
            assert not training()
    else:
        assert training()
    handle.remove()
    now = held(training)
    assert equal(now[:3], before[:3])
    changed = slice(3, None, 3) if step == 4 else slice(4, None, 3)
    assert not any(map(torch.equal, now[changed], before[changed]))
    assert training.optimizer.skipped == {"2.weight": 1, "2.bias": 1}
    for later in range(5, 10):
        backward(model, later)
        training()
    assert not torch.equal(first.weight, before[1])


def test_averaged_gradients_and_second_passes_are_refused() -> None:
    """So is a step without one; what was refused has changed nothing."""
    with pytest.raises(ValueError, match="grad_accumulation_n has to be 1"):
        RigLInBackward(network(), RULE, **SETTINGS, grad_accumulation_n=2)
    model = network()
    training = RigLInBackward(model, RULE, **SETTINGS | {"delta": 1})
    with pytest.raises(BackwardError, match="no gradient has come since the last step"):
        training()
    backward(model, 0)
    before = held(training)
    with pytest.raises(BackwardError, match="has a second gradient in one step"):
        backward(model, 1)
    assert equal(held(training), before)
    with pytest.raises(BackwardError, match="nothing is left to be clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def test_two_who_would_update_a_model_are_refused() -> None:
    """Whichever comes first; closed, gradients stay as usual, and there is room for another."""
    model = network()
    training = RigLInBackward(model, RULE, **SETTINGS)
    with pytest.raises(ValueError, match="updated inside the backward pass already"):
        RigLInBackward(model, RULE, **SETTINGS)
    with pytest.raises(ValueError, match="updated inside the backward pass already"):
        OptimizerInBackward(model, RULE)
    training.close()
    backward(model, 1)
    assert all(one.grad is not None for one in model.parameters())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(BackwardError, match="was closed"):
        training()
    model.zero_grad()
    RigLInBackward(model, RULE, **SETTINGS).close()


def test_a_model_with_a_scheduler_is_refused() -> None:
    """Of the whole, and of a part of it; the scheduler goes on, and once it is closed there is room."""
    other, straight = Training(), Training()
    for model in (other.model, other.model.get_submodule("5")):
        with pytest.raises(ValueError, match=r"weight has a RigLScheduler already: close\(\) that one first"):
            RigLInBackward(model, RULE, **SETTINGS)
        with pytest.raises(ValueError, match="weight has a RigLScheduler already"):
            OptimizerInBackward(model, RULE)
    for one in (other, straight):
        one.run()
    assert equal([*other.model.state_dict().values()], [*straight.model.state_dict().values()])
    other.scheduler.close()
    other.optimizer.zero_grad()
    RigLInBackward(other.model, RULE, **SETTINGS)


class Lacking(torch.optim.SGD):
    """An optimizer of less than it was given."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        """Leave one out."""
        super().__init__(parameters[1:], lr=0.1)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (torch.optim.LBFGS, "LBFGS evaluates the model itself"),
        (Lacking, r"the rule's optimizer lacks 0\.weight"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused(rule: Rule, message: str) -> None:
    """In the words of OptimizerInBackward; nothing is changed, and the model can still be trained."""
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        RigLInBackward(model, rule, **SETTINGS)
    assert equal([*model.state_dict().values()], [*before.values()])
    backward(model, 0)
    assert all(one.grad is not None for one in model.parameters())
    with pytest.raises(ValueError, match=r"0\.weight, .*: with a gradient already, which would be added to"):
        RigLInBackward(model, RULE, **SETTINGS)
    model.zero_grad()
    RigLInBackward(model, RULE, **SETTINGS)


def test_nothing_outlives_its_last_name() -> None:
    """Model and training are gone without the garbage collector."""
    gc.disable()
    try:
        model = network()
        training = RigLInBackward(model, partial(torch.optim.Adam, lr=0.01), **SETTINGS)
        backward(model, 0)
        training()
        gone = [weakref.ref(one) for one in (model, training)]
        del model, training
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()
