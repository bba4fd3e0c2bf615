"""Backward passes that are inside another, and gradients that are there before one."""

from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from impls.training.backward import BackwardError, OptimizerInBackward
from impls.training.gathering import Granularity
from tests.backward_cases import ADAM, SGD, alike, backward, equal, layer, mlp, rows, train, weights
from tests.test_backward_refusals import fails

every_granularity = pytest.mark.parametrize("granularity", get_args(Granularity))


class Halves(nn.Module):
    """A layer whose weight is used inside a reentrant checkpoint, and its bias outside."""

    def __init__(self) -> None:
        """Begin as the identity."""
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))

    @override
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: y @ self.weight, x + self.bias, use_reentrant=True)


@every_granularity
def test_a_layer_half_inside_a_reentrant_checkpoint_is_kept_as_a_whole(granularity: Granularity) -> None:
    """A bias that is bad keeps the weight as it is, whose gradient came in the pass inside."""
    model = Halves()
    optimizer = OptimizerInBackward(model, SGD, granularity)
    handle = model.bias.register_hook(lambda gradient: gradient * torch.nan)
    before = weights(model)
    backward(model)
    optimizer.step()
    assert equal(before, weights(model))
    assert optimizer.skipped == {"weight": 1, "bias": 1}
    handle.remove()
    train(model, optimizer, 1)
    assert not any(map(torch.equal, before, weights(model)))


@every_granularity
@pytest.mark.parametrize("steps", [True, False])
def test_an_error_behind_a_reentrant_checkpoint_is_noticed(granularity: Granularity, steps: bool) -> None:
    """The pass inside is over then, and that of the whole is not."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, granularity)

    def run(*, broken: bool) -> None:
        y = model[:2](rows())
        if broken:
            y.register_hook(fails)
        checkpoint(model[2], y, use_reentrant=True).sum().backward()

    with pytest.raises(ValueError, match="planted"):
        run(broken=True)
    if steps:
        with pytest.raises(BackwardError, match="backward pass ended in an error"):
            optimizer.step()
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())
    run(broken=False)
    optimizer.step()


def failing(_: nn.Parameter) -> None:
    """Fail when a gradient was added, as a hook that comes first may."""
    message = "planted"
    raise ValueError(message)


@pytest.mark.parametrize("way", ["zero_grad", "step", "pass"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_gradient_of_before_is_never_added_to(way: str, by_hand: bool) -> None:
    """Whoever left it: zero_grad() drops it, step() and the next pass drop it and say so."""
    model, plain = mlp(), mlp()
    last = layer(model, 2).bias
    handle = last.register_post_accumulate_grad_hook(failing)
    optimizer = OptimizerInBackward(model, SGD)
    if by_hand:
        last.grad = torch.ones(2)
    else:
        with pytest.raises(ValueError, match="planted"):
            backward(model)
    handle.remove()
    assert last.grad is not None
    if way == "zero_grad":
        optimizer.zero_grad()
    elif way == "step":
        with pytest.raises(BackwardError, match=r"2\.bias: a gradient that nobody used"):
            optimizer.step()
    else:
        with pytest.raises(BackwardError, match=r"2\.bias has a gradient of before.* is dropped"):
            backward(model)
    assert alike(plain, model)
    assert all(one.grad is None for one in model.parameters())
    backward(model)
    optimizer.step()
    train(plain, SGD(list(plain.parameters())), 1)
    assert alike(plain, model)


def test_a_closed_optimizer_leaves_gradients_to_others() -> None:
    """Its zero_grad() drops none: they are no longer its own."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    optimizer.close()
    backward(model)
    optimizer.zero_grad()
    optimizer.close()
    assert all(one.grad is not None for one in model.parameters())


class Counted(torch.optim.SGD):
    """A rule that counts its steps in its groups."""

    @override
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_a_rule_that_counts_in_its_groups_is_refused() -> None:
    """It would count layers, not steps; the error names what it changes."""
    model = mlp()
    optimizer = OptimizerInBackward(model, partial(Counted, lr=0.1))
    with pytest.raises(BackwardError, match="Counted changes k of its groups in a step"):
        backward(model)
    optimizer.close()


@pytest.mark.parametrize("rule", [SGD([nn.Parameter(torch.ones(1))]), None, 0.1])
def test_what_makes_no_optimizer_is_no_rule(rule: Any) -> None:
    """An optimizer itself is none: it has parameters already."""
    with pytest.raises(ValueError, match="give what makes an optimizer of parameters"):
        OptimizerInBackward(mlp(), rule)


@pytest.mark.parametrize("size", ["1MB", -5, float("nan"), None])
def test_a_bucket_has_a_size(size: Any) -> None:
    """A number of bytes, and nothing else."""
    with pytest.raises(ValueError, match=r"bucket_bytes has to be a number of bytes from 0 up, and is"):
        OptimizerInBackward(mlp(), SGD, "bucket", bucket_bytes=size)


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {},
        lambda _: None,
        lambda _: {"state": None},
        lambda good: {**good, "state": None},
        lambda good: {**good, "state": {0: None}},
        lambda good: {**good, "param_groups": [None]},
        lambda good: {**good, "param_groups": [{"params": [0], "param_names": []}]},
    ],
)
def test_what_is_no_state_is_refused(change: Any) -> None:
    """In one line, and nothing is loaded."""
    model = mlp()
    optimizer = OptimizerInBackward(model, ADAM)
    train(model, optimizer, 1)
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"^not the state of an optimizer: give what its state_dict"):
        optimizer.load_state_dict(change(optimizer.state_dict()))
    assert str(optimizer.state_dict()) == before


def test_a_slot_with_more_axes_is_of_another_model() -> None:
    """Also where those that it shares with the parameter have its sizes."""
    model = mlp()
    optimizer = OptimizerInBackward(model, ADAM)
    train(model, optimizer, 1)
    state = optimizer.state_dict()
    slots = {**state["state"][0], "exp_avg": state["state"][0]["exp_avg"][None]}
    with pytest.raises(ValueError, match=r"exp_avg of 0\.weight is \(1, 8, 4\)"):
        optimizer.load_state_dict({**state, "state": {**state["state"], 0: slots}})
