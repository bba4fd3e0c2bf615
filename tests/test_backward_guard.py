"""The guard of the optimizer in backward: what is not finite changes nothing."""

import copy
from typing import get_args

import pytest
import torch
from torch import nn

from impls.training.backward import OptimizerInBackward
from impls.training.gathering import Granularity
from tests.backward_cases import ADAM, SGD, alike, equal, layer, mlp, train, weights

every_granularity = pytest.mark.parametrize("granularity", get_args(Granularity))


@every_granularity
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_its_layer_as_it_was(
    bad: float, granularity: Granularity
) -> None:
    """Weights and state of the layer stay, those of the others change; later steps go on."""
    model = mlp()
    optimizer = OptimizerInBackward(model, ADAM, granularity)
    train(model, optimizer, 2)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    handles = [one.register_hook(lambda gradient: gradient * bad) for one in model[0].parameters()]
    train(model, optimizer, 1)
    after, now = weights(model), optimizer.state_dict()["state"]
    kept = [torch.equal(one, other) for one, other in zip(before, after, strict=True)]
    assert kept == [True, True, False, False]
    assert [state[key]["step"] == now[key]["step"] for key in range(4)] == kept
    assert all(torch.equal(state[key]["exp_avg"], now[key]["exp_avg"]) for key in (0, 1))
    assert optimizer.skipped == {"0.weight": 1, "0.bias": 1}
    for handle in handles:
        handle.remove()
    train(model, optimizer, 1)
    assert not equal(weights(model)[:2], after[:2])


@pytest.mark.parametrize("scale", [3e38, -3e38])
def test_large_gradients_are_used_where_they_are_finite(scale: float) -> None:
    """Also where their sum is not: the guard looks at each of them then."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = OptimizerInBackward(model, SGD)
    before = weights(model)
    (model(torch.ones(1, 4)).sum() * scale).backward()
    optimizer.step()
    assert not equal(before, weights(model))
    assert not optimizer.skipped


def test_infinities_that_cancel_are_not_finite() -> None:
    """One of each sign in a gradient, whose sum is no number either."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = OptimizerInBackward(model, ADAM)
    before = weights(model)
    model(torch.tensor([[torch.inf, -torch.inf]])).sum().backward()
    optimizer.step()
    assert equal(before, weights(model))
    assert optimizer.skipped == {"weight": 1}


@every_granularity
@pytest.mark.parametrize("bucket_bytes", [1, 9, 10**6])
@pytest.mark.parametrize("bad", range(4))
def test_one_bad_gradient_keeps_its_whole_layer_and_no_other(
    bad: int, bucket_bytes: int, granularity: Granularity
) -> None:
    """Whichever of a layer's parameters it is, and wherever a bucket ends; a bucket's other layers learn."""
    model = mlp()
    before = weights(model)
    optimizer = OptimizerInBackward(model, ADAM, granularity, bucket_bytes=bucket_bytes)
    list(model.parameters())[bad].register_hook(lambda gradient: gradient * torch.inf)
    train(model, optimizer, 1)
    kept = [torch.equal(one, other) for one, other in zip(before, weights(model), strict=True)]
    assert kept == [bad < 2, bad < 2, bad >= 2, bad >= 2]
    assert len(optimizer.state) == 2


@every_granularity
def test_layers_with_one_weight_are_one_layer(granularity: Granularity) -> None:
    """The bias of a layer is kept when that of another is bad which has the same weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    layer(model, 2).weight = layer(model, 0).weight
    before = dict(zip(dict(model.named_parameters()), weights(model), strict=True))
    optimizer = OptimizerInBackward(model, ADAM, granularity, bucket_bytes=1)
    layer(model, 2).bias.register_hook(lambda gradient: gradient * torch.nan)
    train(model, optimizer, 1)
    changed = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert changed == {"3.weight", "3.bias"}


@every_granularity
def test_a_parametrized_weight_is_of_its_layer(granularity: Granularity) -> None:
    """What a weight is computed of stays with the bias beside it."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    before = weights(model)
    optimizer = OptimizerInBackward(model, ADAM, granularity, bucket_bytes=1)
    model.get_parameter("0.bias").register_hook(lambda gradient: gradient * torch.nan)
    train(model, optimizer, 1)
    kept = [torch.equal(one, other) for one, other in zip(before, weights(model), strict=True)]
    assert kept == [True, True, True, False, False]


def test_complex_gradients_are_looked_at() -> None:
    """A part that is not finite is enough."""
    for factor, changes in ((1.0, True), (torch.nan, False)):
        model = nn.Linear(2, 2, dtype=torch.complex64)
        before = weights(model)
        optimizer = OptimizerInBackward(model, SGD)
        (model(torch.ones(1, 2, dtype=torch.complex64)).imag * factor).sum().backward()
        optimizer.step()
        assert equal(before, weights(model)) != changes


def test_what_is_not_finite_is_used_where_that_is_asked_for() -> None:
    """Without the guard NaN goes into the weights, as it does with the ordinary optimizer."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, skip_nonfinite=False)
    layer(model, 2).bias.register_hook(lambda gradient: gradient * torch.nan)
    train(model, optimizer, 1)
    assert bool(layer(model, 2).bias.isnan().all())


def test_sparse_gradients_are_used() -> None:
    """An embedding with sparse gradients learns as with the ordinary optimizer, behind the guard."""
    plain = nn.Embedding(5, 3, sparse=True)
    model = copy.deepcopy(plain)
    ordinary, optimizer = torch.optim.SGD(plain.parameters(), 0.1), OptimizerInBackward(model, SGD)
    for one, its in ((plain, ordinary), (model, optimizer)):
        one(torch.tensor([1, 1, 4])).square().sum().backward()
        its.step()
    assert alike(plain, model)
