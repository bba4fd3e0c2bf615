"""The optimizer that steps inside the backward pass."""

import copy
import gc
import itertools
import weakref
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from impls.training.backward import OptimizerInBackward, Rule
from impls.training.gathering import Granularity
from tests.backward_cases import (
    ADAM,
    MOMENTUM,
    RULES,
    SGD,
    alike,
    backward,
    equal,
    layer,
    mlp,
    rows,
    train,
    twins,
    weights,
)

every_granularity = pytest.mark.parametrize("granularity", get_args(Granularity))


@every_granularity
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_training_is_bit_for_bit_that_of_the_ordinary_optimizer(rule: Rule, granularity: Granularity) -> None:
    """Weights and state are equal after some steps, whatever is updated at once; no gradient is left."""
    make = partial(OptimizerInBackward, granularity=granularity, bucket_bytes=100)
    plain, ordinary, model, optimizer = twins(rule, make)
    train(plain, ordinary, 5)
    train(model, optimizer, 5)
    assert alike(plain, model)
    assert all(parameter.grad is None for parameter in model.parameters())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert ordinary.state[one].keys() == optimizer.state[other].keys()
        for slot, value in ordinary.state[one].items():
            assert value is None or torch.equal(value, optimizer.state[other][slot])


def test_one_step_by_hand() -> None:
    """Of the sum of 1 * 1 + 0 both gradients are 1, and half of that is taken off."""
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = OptimizerInBackward(model, partial(torch.optim.SGD, lr=0.5))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert (model.weight.item(), model.bias.item()) == (0.5, -0.5)


@every_granularity
def test_the_update_is_over_when_the_backward_pass_is(granularity: Granularity) -> None:
    """Before step() is called all parameters have changed, also what was left in a bucket or of a module."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    layer(model, 0).bias.register_hook(torch.zeros_like)
    before = weights(model)
    optimizer = OptimizerInBackward(model, ADAM, granularity)
    x = rows()
    nn.functional.linear(
        nn.functional.linear(x, layer(model, 0).weight), layer(model, 1).weight
    ).sum().backward()
    changed = [not torch.equal(one, other) for one, other in zip(before, weights(model), strict=True)]
    assert changed == [True, False, True, False]
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()


class Crossed(nn.Module):
    """The parameters of one layer come first and last in the backward pass, with another layer between."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        """Use the weight at once, and the bias at last."""
        return self.inner(nn.functional.linear(x, self.outer.weight).tanh()) * self.outer.bias


@every_granularity
def test_who_waits_is_not_updated_with_others(granularity: Granularity) -> None:
    """A bias whose weight comes last is updated once, though other modules are updated before."""
    plain = Crossed()
    model = copy.deepcopy(plain)
    ordinary = MOMENTUM(list(plain.parameters()))
    optimizer = OptimizerInBackward(model, MOMENTUM, granularity, bucket_bytes=1)
    train(plain, ordinary, 3)
    train(model, optimizer, 3)
    assert alike(plain, model)


@every_granularity
def test_gradients_of_inputs_are_those_of_the_weights_before_the_update(granularity: Granularity) -> None:
    """What is passed on to earlier layers does not see the new weights."""
    model, x = mlp(), rows().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().mean(), x)
    optimizer = OptimizerInBackward(model, partial(torch.optim.SGD, lr=100.0), granularity)
    model(x).square().mean().backward()
    optimizer.step()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def live_bytes(model: nn.Module, x: Tensor) -> int:
    """Return the most bytes of gradients that a backward pass holds at once."""
    most = 0
    parameters = list(model.parameters())

    def look(gradient: Tensor) -> None:
        nonlocal most
        held = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
        most = max(most, held + gradient.nbytes)

    for parameter in parameters:
        parameter.register_hook(look)
    model(x).square().mean().backward()
    return most


PARAMETER, LAYER, ALL = 4 * 32, 4 * (32 + 8), 4 * (32 + 8 + 16 + 2)
"""Bytes of the gradients of :func:`mlp`: of its largest parameter and layer, and in all."""


@pytest.mark.parametrize(
    ("granularity", "bucket_bytes", "unguarded", "guarded"),
    [
        ("parameter", 0, PARAMETER, LAYER),
        ("module", 0, LAYER, LAYER),
        # Behind the bias of the last layer, 8 bytes, comes its weight, 64, then the bias of the first, 32.
        ("bucket", 1, PARAMETER, LAYER),
        ("bucket", 8 + 64, LAYER, LAYER),
        ("bucket", 8 + 64 + 1, PARAMETER, ALL),
        ("bucket", 8 + 64 + 32 + 1, ALL, ALL),
    ],
)
def test_so_many_bytes_of_gradients_live_at_once(
    granularity: Granularity, bucket_bytes: int, unguarded: int, guarded: int
) -> None:
    """Those of the largest parameter or bucket exactly; with the guard of the largest layer, or of layers."""
    for skips, expected in ((False, unguarded), (True, guarded)):
        model = mlp()
        optimizer = OptimizerInBackward(
            model, SGD, granularity, bucket_bytes=bucket_bytes, skip_nonfinite=skips
        )
        assert live_bytes(model, rows()) == expected
        optimizer.close()
    assert live_bytes(mlp(), rows()) == ALL


@pytest.mark.parametrize(("bucket_bytes", "layers"), [(1, 1), (256, 1), (257, 2), (768, 3), (10**6, 8)])
def test_gradients_of_a_bucket_live_at_once(bucket_bytes: int, layers: int) -> None:
    """Of eight layers with 256 bytes each so many as make the bucket full, and no more."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8)))
    optimizer = OptimizerInBackward(model, SGD, "bucket", bucket_bytes=bucket_bytes)
    assert live_bytes(model, torch.ones(1, 8)) == 256 * layers
    optimizer.step()


def test_a_schedule_changes_the_update() -> None:
    """With a learning rate of 0 from the third step on, nothing is updated from there on."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, "bucket")
    schedule = LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
    seen = [weights(model)]
    for step in range(4):
        backward(model, step)
        optimizer.step()
        schedule.step()
        seen.append(weights(model))
    assert [equal(*pair) for pair in itertools.pairwise(seen)] == [False, False, True, True]


def test_a_schedule_is_that_of_the_ordinary_optimizer() -> None:
    """A cosine schedule gives the same weights, also after the state came from elsewhere."""
    plain, ordinary, model, optimizer = twins(ADAM)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 8) for one in (ordinary, optimizer)]
    for step in range(8):
        if step == 4:
            optimizer.load_state_dict(ordinary.state_dict())
        train(plain, ordinary, 1, step)
        train(model, optimizer, 1, step)
        for schedule in schedules:
            schedule.step()
    assert alike(plain, model)
    assert optimizer.param_groups[0]["lr"] == ordinary.param_groups[0]["lr"]


def grouped(parameters: list[nn.Parameter]) -> Optimizer:
    """Decay weights and not biases."""
    matrices = [one for one in parameters if one.ndim > 1]
    vectors = [one for one in parameters if one.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0, "lr": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


@every_granularity
def test_a_rule_may_have_groups(granularity: Granularity) -> None:
    """Each parameter is updated by the options of its own group."""
    plain, ordinary, model, optimizer = twins(grouped, partial(OptimizerInBackward, granularity=granularity))
    train(plain, ordinary, 3)
    train(model, optimizer, 3)
    assert alike(plain, model)


@pytest.mark.parametrize("rule", [MOMENTUM, ADAM, grouped])
def test_state_goes_from_one_kind_of_optimizer_to_the_other(rule: Rule) -> None:
    """Training goes on bit for bit with the state of the other kind."""
    plain, ordinary, model, optimizer = twins(rule)
    train(plain, ordinary, 3)
    train(model, optimizer, 3)
    states = copy.deepcopy(ordinary.state_dict()), copy.deepcopy(optimizer.state_dict())
    changed = rule(list(plain.parameters()))
    changed.load_state_dict(states[1])
    optimizer.load_state_dict(states[0])
    train(plain, changed, 3, 3)
    train(model, optimizer, 3, 3)
    assert alike(plain, model)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        for slot, value in changed.state[one].items():
            assert torch.equal(value, optimizer.state[other][slot])


def test_state_is_found_by_name() -> None:
    """A model that has its parameters in another order takes the state over by their names."""

    class Reordered(nn.Module):
        def __init__(self, model: nn.Sequential) -> None:
            super().__init__()
            self.add_module("2", model[2])
            self.add_module("0", model[0])

        def forward(self, x: Tensor) -> Any:
            return self.get_submodule("2")(self.get_submodule("0")(x).tanh())

    model = mlp()
    optimizer = OptimizerInBackward(model, ADAM)
    train(model, optimizer, 2)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [
        *("0.weight", "0.bias", "2.weight", "2.bias")
    ]
    other = Reordered(copy.deepcopy(model))
    moved = OptimizerInBackward(other, ADAM)
    moved.load_state_dict(optimizer.state_dict())
    train(model, optimizer, 2, 2)
    train(other, moved, 2, 2)
    assert alike(model, nn.Sequential(other.get_submodule("0"), other.get_submodule("2")))


def test_options_come_with_the_state() -> None:
    """A state that was saved at a learning rate of 0 stops the updates; groups stay the same objects."""
    model = mlp()
    optimizer = OptimizerInBackward(model, MOMENTUM)
    groups = list(optimizer.param_groups)
    optimizer.load_state_dict(torch.optim.SGD(mlp().parameters(), lr=0.0, momentum=0.9).state_dict())
    before = weights(model)
    train(model, optimizer, 1)
    assert equal(before, weights(model))
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))


def test_loading_takes_a_copy() -> None:
    """What is loaded stays as it is while training goes on."""
    _, _, model, optimizer = twins(ADAM)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    other = mlp()
    moved = OptimizerInBackward(other, ADAM)
    moved.load_state_dict(saved)
    train(other, moved, 2)
    assert torch.equal(saved["state"][0]["exp_avg"], kept["state"][0]["exp_avg"])


class Tied(nn.Module):
    """One weight in two layers, each of which may be a checkpoint."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        """Make the weight."""
        super().__init__()
        self.layer = layer(mlp(), 0)
        self.back = nn.Linear(8, 4, bias=False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Any:
        """Use it twice."""
        for _ in range(2):
            if self.reentrant is None:
                x = self._once(x)
            else:
                x = checkpoint(self._once, x, use_reentrant=self.reentrant)
        return x

    def _once(self, x: Tensor) -> Any:
        return self.back(self.layer(x).tanh())


@every_granularity
@pytest.mark.parametrize("reentrant", [None, False])
def test_tied_weights_are_updated_once_with_the_sum(reentrant: bool | None, granularity: Granularity) -> None:
    """A weight that is used twice has its turn when both gradients are there, in checkpoints as well."""
    plain = Tied(reentrant=reentrant)
    model = copy.deepcopy(plain)
    ordinary, optimizer = ADAM(list(plain.parameters())), OptimizerInBackward(model, ADAM, granularity)
    train(plain, ordinary, 3)
    train(model, optimizer, 3)
    assert alike(plain, model)


@every_granularity
@pytest.mark.parametrize("closes", [True, False])
def test_nothing_stays_when_everybody_lets_go(closes: bool, granularity: Granularity) -> None:
    """Model, parameters and optimizer are gone without a garbage collection, and with a schedule on it."""
    model = mlp()
    optimizer = OptimizerInBackward(model, ADAM, granularity)
    schedule = LambdaLR(optimizer, lambda _: 1.0)
    train(model, optimizer, 2)
    schedule.step()
    seen = [weakref.ref(one) for one in (model, layer(model, 0).weight, optimizer)]
    gc.collect()
    gc.disable()
    try:
        if closes:
            optimizer.close()
        del model, optimizer, schedule
        assert [one() for one in seen] == [None] * 3
    finally:
        gc.enable()


def test_a_closed_optimizer_leaves_gradients_alone() -> None:
    """After close() gradients stay, an ordinary optimizer can take over, and so can another of this kind."""
    plain, ordinary, model, optimizer = twins(ADAM)
    train(plain, ordinary, 2)
    train(model, optimizer, 2)
    assert isinstance(optimizer, OptimizerInBackward)
    optimizer.close()
    ordinary_now = ADAM(list(model.parameters()))
    ordinary_now.load_state_dict(optimizer.state_dict())
    train(plain, ordinary, 1, 2)
    train(model, ordinary_now, 1, 2)
    assert alike(plain, model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    again = OptimizerInBackward(model, ADAM)
    again.load_state_dict(ordinary_now.state_dict())
    train(plain, ordinary, 1, 3)
    train(model, again, 1, 3)
    assert alike(plain, model)


def test_what_has_no_gradient_is_left_alone() -> None:
    """A parameter that a pass does not reach keeps its weights and state, as with the ordinary optimizer."""
    model = mlp()
    model.add_module("unused", nn.Linear(2, 2))
    before = weights(model)
    optimizer = OptimizerInBackward(model, ADAM, "bucket")
    model[:3](rows()).sum().backward()
    optimizer.step()
    assert equal(before[4:], weights(model)[4:])
    assert len(optimizer.state) == 4
