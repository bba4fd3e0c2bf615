"""Layers with their own optimizers train like the whole model, and are copied with them."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from impls.training.implicit_optimizer import AutoOptimizer, ImplicitOptimizer
from impls.training.optimizer_in_backward import BackwardError, OptimizerInBackward
from tests.training.models import (
    ADAM,
    MOMENTUM,
    RULES,
    SGD,
    alike,
    backward,
    equal,
    fails,
    implicit,
    mlp,
    rows,
    same_entries,
    train,
    weights,
)


def test_layers_with_their_own_optimizer_train_like_the_whole_model() -> None:
    """Bitwise, with every rule."""
    for name, (rule, _) in RULES.items():
        plain, model = mlp(), implicit(rule)
        train(plain, rule(list(plain.parameters())), 4)
        train(model, ImplicitOptimizer(model), 4)
        assert alike(plain, model), name


def test_layers_may_have_different_rules_and_go_unused() -> None:
    """Each continues as it would alone; one layer's bad gradient does not affect the others."""
    plain, (first, middle, last) = mlp(), mlp()
    ordinary = [MOMENTUM(list(plain[0].parameters())), ADAM(list(plain[2].parameters()))]
    model = nn.Sequential(AutoOptimizer(first, MOMENTUM), middle, AutoOptimizer(last, ADAM))
    optimizer = ImplicitOptimizer(model)
    train(model, optimizer, 3)
    for step in range(3):
        plain.zero_grad()
        backward(plain, step)
        for one in ordinary:
            one.step()
    assert alike(plain, model)
    model[0](rows()).sum().backward()
    optimizer.step()
    before = weights(model)
    handle = model.get_parameter("0.layer.bias").register_hook(lambda gradient: gradient * torch.nan)
    train(model, optimizer)
    handle.remove()
    assert same_entries(before, weights(model)) == [True, True, False, False]
    for end in (optimizer.step, optimizer.zero_grad):
        handle = model.get_parameter("0.layer.weight").register_hook(fails)
        with pytest.raises(ValueError, match="planted"):
            backward(model)
        handle.remove()
        if end == optimizer.step:
            with pytest.raises(BackwardError, match="backward pass ended in an error"):
                end()
        else:
            end()
        train(model, optimizer)


def test_every_layer_needs_exactly_one_optimizer() -> None:
    """Mixed models, layers without a rule and tied layers are refused, as is another model's optimizer."""
    mixed = nn.Sequential(AutoOptimizer(nn.Linear(4, 8), SGD), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"1\.weight, 1\.bias: not updated inside the backward pass"):
        ImplicitOptimizer(mixed)
    with pytest.raises(ValueError, match="the model: not updated"):
        ImplicitOptimizer(nn.Sequential())
    with pytest.raises(ValueError, match=r"0\.layer\.weight, 0\.layer\.bias: already managed"):
        OptimizerInBackward(mixed, SGD)
    bare = AutoOptimizer(nn.Linear(4, 2))
    with pytest.raises(BackwardError, match="no rule yet"):
        bare(rows())
    with pytest.raises(ValueError, match="layer: no rule yet"):
        ImplicitOptimizer(nn.ModuleDict({"layer": bare}))
    with torch.no_grad():
        assert bare(rows()).shape == (3, 2)
    assert copy.deepcopy(bare).optimizer is None
    bare.initialize(SGD)
    train(bare, ImplicitOptimizer(bare))
    with pytest.raises(BackwardError, match="already has a rule"):
        bare.initialize(SGD)
    second = nn.Linear(4, 2)
    second.weight = bare.layer.get_parameter("weight")
    with pytest.raises(ValueError, match="weight: already managed"):
        AutoOptimizer(second, SGD)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """Return a model from torch's own file format."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


COPIES: tuple[Callable[[nn.Module], nn.Module], ...] = (
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),  # noqa: S301  created here
    saved_and_loaded,
)


@pytest.mark.parametrize("make", COPIES, ids=["deepcopy", "pickle", "torch.save"])
def test_a_copied_layer_continues_on_its_own(make: Callable[[nn.Module], Any]) -> None:
    """With a copy of the optimizer's state, hooks, and buffers; closed ones stay so."""
    model = implicit()
    optimizer = ImplicitOptimizer(model)
    train(model, optimizer, 2)
    before, other = weights(model), make(model.eval())
    assert not any(module.training for module in other.modules())
    train(other, ImplicitOptimizer(other), 2, 2)
    assert equal(before, weights(model))
    train(model, optimizer, 2, 2)
    assert alike(model, other)
    closed = AutoOptimizer(nn.Linear(4, 2), SGD)
    closed.register_buffer("scale", torch.ones(2))
    assert closed.optimizer is not None
    closed.optimizer.close()
    other = make(closed)
    assert torch.equal(other.get_buffer("scale"), torch.ones(2))
    before = weights(other)
    backward(other)
    assert equal(before, weights(other))
