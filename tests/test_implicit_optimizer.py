"""Layers that carry their optimizer, and the one that stands for them in a training loop."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from impls.training.backward import (
    AutoOptimizer,
    BackwardError,
    ImplicitOptimizer,
    OptimizerInBackward,
    Rule,
    check_optimizer,
)
from tests.backward_cases import ADAM, MOMENTUM, RULES, SGD, alike, backward, equal, mlp, rows, train, weights


def implicit(rule: Rule = ADAM) -> nn.Sequential:
    """Make the model of :func:`mlp` with an optimizer in each layer."""
    first, middle, last = mlp()
    return nn.Sequential(AutoOptimizer(first, rule), middle, AutoOptimizer(last, rule))


def optimizer_of(model: nn.Sequential) -> OptimizerInBackward:
    """Return that of the first layer."""
    first = model[0]
    assert isinstance(first, AutoOptimizer)
    assert first.optimizer is not None
    return first.optimizer


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_layers_train_like_the_whole(rule: Rule) -> None:
    """Each layer's own optimizer gives the weights of an ordinary one over the model, bit for bit."""
    plain, model = mlp(), implicit(rule)
    train(plain, rule(list(plain.parameters())), 4)
    train(model, ImplicitOptimizer(model), 4)
    assert alike(plain, model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_schedule_reaches_every_layer() -> None:
    """At a learning rate of 0 no layer is updated, also after a layer's own state was loaded."""
    model = implicit()
    optimizer = ImplicitOptimizer(model)
    schedule = LambdaLR(optimizer, lambda step: float(step == 0))
    train(model, optimizer, 1)
    layer = optimizer_of(model)
    layer.load_state_dict(layer.state_dict())
    schedule.step()
    before = weights(model)
    train(model, optimizer, 1)
    assert equal(before, weights(model))


def test_layers_may_have_rules_of_their_own() -> None:
    """One by momentum, one by Adam: each goes on as it would alone."""
    plain, (first, middle, last) = mlp(), mlp()
    ordinary = [MOMENTUM(list(plain[0].parameters())), ADAM(list(plain[2].parameters()))]
    model = nn.Sequential(AutoOptimizer(first, MOMENTUM), middle, AutoOptimizer(last, ADAM))
    train(model, ImplicitOptimizer(model), 3)
    for step in range(3):
        plain.zero_grad()
        backward(plain, step)
        for one in ordinary:
            one.step()
    assert alike(plain, model)


def test_mixing_implicit_and_explicit_layers_is_refused() -> None:
    """The error names what is on the wrong side."""
    model = nn.Sequential(AutoOptimizer(nn.Linear(4, 8), SGD), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"1\.weight, 1\.bias: not updated inside the backward pass"):
        ImplicitOptimizer(model)
    with pytest.raises(ValueError, match="the model: not updated"):
        ImplicitOptimizer(nn.Sequential())
    with pytest.raises(ValueError, match=r"0\.layer\.weight, 0\.layer\.bias: updated inside the backward"):
        OptimizerInBackward(model, SGD)


def test_a_layer_without_a_rule_is_refused() -> None:
    """Neither a training loop nor a forward pass that records gradients goes on; evaluation does."""
    layer = AutoOptimizer(nn.Linear(4, 2))
    with pytest.raises(BackwardError, match="no rule yet"):
        layer(rows())
    with pytest.raises(ValueError, match="layer: no rule yet"):
        ImplicitOptimizer(nn.ModuleDict({"layer": layer}))
    with torch.no_grad():
        assert layer(rows()).shape == (3, 2)
    layer.initialize(SGD)
    train(layer, ImplicitOptimizer(layer), 1)
    with pytest.raises(BackwardError, match="a rule already"):
        layer.initialize(SGD)


def test_a_tied_layer_has_one_optimizer() -> None:
    """A weight in two layers would be updated twice: the second layer is refused."""
    first = nn.Linear(4, 4)
    second = nn.Linear(4, 4)
    second.weight = first.weight
    kept = AutoOptimizer(first, SGD)
    with pytest.raises(ValueError, match="weight: updated inside the backward pass already"):
        AutoOptimizer(second, SGD)
    assert kept.optimizer is not None


def test_an_optimizer_is_held_to_its_model() -> None:
    """Implicit to implicit, explicit to explicit, and none of another model."""
    plain, model, other = mlp(), implicit(), implicit()
    ordinary, optimizer = SGD(list(plain.parameters())), ImplicitOptimizer(model)
    check_optimizer(plain, ordinary)
    check_optimizer(model, optimizer)
    with pytest.raises(ValueError, match="SGD would change nothing"):
        check_optimizer(model, SGD(list(model.parameters())))
    with pytest.raises(ValueError, match="nobody updates it"):
        check_optimizer(plain, optimizer)
    with pytest.raises(ValueError, match=r"the optimizer lacks 2\.weight"):
        check_optimizer(plain, SGD(list(plain[0].parameters())))
    with pytest.raises(ValueError, match="the optimizer lacks"):
        check_optimizer(other, optimizer)
    with pytest.raises(ValueError, match=r"0\.0\.layer\.weight.*: updated.*1\.0\.weight.*: not"):
        check_optimizer(nn.Sequential(model, plain), optimizer)
    optimizer.close()
    with pytest.raises(ValueError, match="was the optimizer closed"):
        check_optimizer(model, optimizer)


def test_the_loop_is_held_to_its_steps() -> None:
    """No step without a pass, no pass without a step, no closure, no scaler, no clipping."""
    model = implicit()
    optimizer = ImplicitOptimizer(model)
    with pytest.raises(BackwardError, match=r"call backward\(\) first"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(rows()).sum()).backward()
    with pytest.raises(BackwardError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(BackwardError, match="second gradient"):
        backward(model)
    with pytest.raises(BackwardError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(BackwardError, match="nothing is left to be clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    train(model, optimizer, 1)


def test_a_layer_that_is_not_used_may_wait() -> None:
    """A step ends for all layers, whether they had a gradient in it or not."""
    model = implicit(SGD)
    optimizer = ImplicitOptimizer(model)
    model[0](rows()).sum().backward()
    optimizer.step()
    train(model, optimizer, 1)


def test_a_layer_that_is_not_finite_stays() -> None:
    """The layer concerned keeps weights and state; the other one learns."""
    model = implicit()
    optimizer = ImplicitOptimizer(model)
    before = weights(model)
    model.get_parameter("0.layer.bias").register_hook(lambda gradient: gradient * torch.nan)
    train(model, optimizer, 1)
    kept = [torch.equal(*pair) for pair in zip(before, weights(model), strict=True)]
    assert kept == [True, True, False, False]
    assert not optimizer_of(model).state


def test_a_failed_pass_ends_for_all_layers() -> None:
    """One step() says so, whichever layers it reached, and the next step is a whole one."""
    model = implicit(SGD)
    optimizer = ImplicitOptimizer(model)
    for end in (optimizer.step, optimizer.zero_grad):
        seen: list[object] = []

        def fail(gradient: Tensor, seen: list[object] = seen) -> None:
            seen.append(gradient)
            message = "planted"
            raise ValueError(message)

        handle = model.get_parameter("0.layer.weight").register_hook(fail)
        with pytest.raises(ValueError, match="planted"):
            backward(model)
        handle.remove()
        if end == optimizer.step:
            with pytest.raises(BackwardError, match="backward pass ended in an error"):
                end()
        else:
            end()
        plain = mlp()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            one.data.copy_(other)
        train(model, optimizer, 1)
        train(plain, SGD(list(plain.parameters())), 1)
        assert alike(plain, model)


def test_state_goes_by_name() -> None:
    """It is saved and loaded by name, and goes to an optimizer over the whole and back."""
    model = implicit()
    optimizer = ImplicitOptimizer(model)
    train(model, optimizer, 2)
    state = copy.deepcopy(optimizer.state_dict())
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    assert names == ["0.layer.weight", "0.layer.bias", "2.layer.weight", "2.layer.bias"]
    whole = mlp()
    whole.load_state_dict({name.replace("layer.", ""): value for name, value in model.state_dict().items()})
    one = OptimizerInBackward(whole, ADAM)
    for group in state["param_groups"]:
        group["param_names"] = [name.replace("layer.", "") for name in group["param_names"]]
    one.load_state_dict(state)
    train(whole, one, 2, 2)
    train(model, optimizer, 2, 2)
    assert alike(whole, model)
    back = copy.deepcopy(one.state_dict())
    back["param_groups"][0]["param_names"] = names
    optimizer.load_state_dict(back)
    train(whole, one, 2, 4)
    train(model, optimizer, 2, 4)
    assert alike(whole, model)


def test_a_copy_goes_on_alone() -> None:
    """A copied or unpickled layer has its own optimizer with the same state; the first one is left alone."""
    model = implicit(partial(torch.optim.Adam, lr=0.01))
    optimizer = ImplicitOptimizer(model)
    train(model, optimizer, 2)
    model.eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),  # noqa: S301  it was made here
        torch.load(file, weights_only=False),
    ]
    kept = weights(model)
    for other in copies:
        assert not any(module.training for module in other.modules())
        train(other, ImplicitOptimizer(other), 2, 2)
    assert equal(kept, weights(model))
    train(model, optimizer, 2, 2)
    assert all(alike(model, other) for other in copies)
    untrained = AutoOptimizer(nn.Linear(2, 2))
    assert copy.deepcopy(untrained).optimizer is None


def copies(layer: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Copy a layer, and pickle it."""
    return copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))  # noqa: S301  it was made here


def see(layer: nn.Module, *_: object) -> None:
    """Count calls of a layer, as a forward hook."""
    vars(layer)["calls"] += 1


def test_a_copy_computes_the_same() -> None:
    """A frozen norm stays frozen; hooks, buffers and attributes of the layer go with it."""
    layer = AutoOptimizer(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), SGD)
    layer.layer[1].eval()  # type: ignore[index]  # a sequence
    vars(layer)["calls"] = 0
    layer.register_buffer("scale", torch.ones(2))
    layer.register_forward_hook(see)
    for other in copies(layer):
        assert [one.training for one in other.modules()] == [one.training for one in layer.modules()]
        assert torch.equal(other(rows()), layer.layer(rows()))
        assert vars(other)["calls"] == 1
        assert torch.equal(other.get_buffer("scale"), torch.ones(2))


def test_a_copy_of_a_closed_layer_is_closed() -> None:
    """It is trained by nobody, as the first."""
    layer = AutoOptimizer(nn.Linear(4, 2), SGD)
    assert layer.optimizer is not None
    layer.optimizer.close()
    for other in copies(layer):
        before = weights(other)
        backward(other)
        assert equal(before, weights(other))
        with pytest.raises(BackwardError, match="closed"):
            ImplicitOptimizer(other).step()


@pytest.mark.parametrize("names", [["bias"], ["weight", "bias"]])
def test_a_copy_of_a_frozen_layer_is_frozen(names: list[str]) -> None:
    """In part or all of it; what was thawed learns on with the state that it had."""
    layer = AutoOptimizer(nn.Linear(4, 2), MOMENTUM)
    train(layer, ImplicitOptimizer(layer), 2)
    for name in names:
        layer.layer.get_parameter(name).requires_grad = False
    for other in copies(layer):
        flags = [one.requires_grad for one in other.parameters()]
        assert flags == [one.requires_grad for one in layer.parameters()]
        other.requires_grad_()
        plain = copy.deepcopy(layer).requires_grad_()
        train(other, ImplicitOptimizer(other), 2, 2)
        train(plain, ImplicitOptimizer(plain), 2, 2)
        assert alike(plain, other)
        assert not equal(weights(layer), weights(other))
