"""What an optimizer in backward cannot do right ends with an error that says so, never with a wrong step."""

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from impls.training.backward import BackwardError, OptimizerInBackward, Rule
from impls.training.gathering import Granularity
from tests.backward_cases import ADAM, SGD, alike, backward, equal, layer, mlp, rows, train, weights
from tests.test_backward import Tied

every_granularity = pytest.mark.parametrize("granularity", get_args(Granularity))


@every_granularity
def test_a_second_backward_pass_is_refused(granularity: Granularity) -> None:
    """Accumulating gradients over micro-batches cannot be done; weights stay as the first pass left them."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, granularity, bucket_bytes=100)
    backward(model, 0)
    before = weights(model)
    with pytest.raises(BackwardError, match=r"second gradient in one step.*step\(\) after each"):
        backward(model, 1)
    assert equal(before, weights(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    optimizer.step()
    backward(model, 1)
    assert not equal(before, weights(model))


def test_a_graph_cannot_be_gone_through_twice() -> None:
    """A retained graph has the weights of before the update: torch or we refuse it, also behind step()."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    loss = model(rows()).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every_granularity
def test_reentrant_checkpoints_of_a_tied_weight_are_refused(granularity: Granularity) -> None:
    """Each checkpoint has a backward pass of its own, and the second finds a weight that has changed."""
    model = Tied(reentrant=True)
    optimizer = OptimizerInBackward(model, SGD, granularity)
    with pytest.raises(BackwardError, match="reentrant checkpoints use twice"):
        model(rows().requires_grad_()).sum().backward()
    optimizer.close()


@every_granularity
def test_reentrant_checkpoints_of_separate_weights_are_right(granularity: Granularity) -> None:
    """Where each weight is in one checkpoint the step is that of the ordinary optimizer."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: Tensor) -> Tensor:
            for part in self.model:
                x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)
            return x

    plain = Checkpointed()
    model = copy.deepcopy(plain)
    ordinary, optimizer = ADAM(list(plain.parameters())), OptimizerInBackward(model, ADAM, granularity)
    for step in range(3):
        for one, its in ((plain, ordinary), (model, optimizer)):
            its.zero_grad()
            one(rows(step).requires_grad_()).square().mean().backward()
            its.step()
    assert alike(plain, model)


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: clip_grad_norm_(list(model.parameters()), 1.0),
        lambda model: nn.utils.clip_grad_norm_(layer(model, 0).weight, max_norm=1.0),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.ones(())),
    ],
    ids=["generator", "list", "one", "value", "with norm"],
)
def test_clipping_what_is_gone_is_refused(clip: Callable[[nn.Sequential], object]) -> None:
    """A norm of 0 is no answer; after close() it is torch's own function again."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    backward(model)
    with pytest.raises(BackwardError, match="nothing is left to be clipped"):
        clip(model)
    optimizer.step()
    optimizer.close()
    backward(model)
    clip(model)


def test_a_norm_of_gradients_that_are_gone_is_refused() -> None:
    """Of none at all, as long as somebody uses them in the pass; those of other models have their norm."""
    model, plain = mlp(), mlp()
    backward(plain)
    optimizer = OptimizerInBackward(model, SGD)
    backward(model)
    with pytest.raises(BackwardError, match="no gradients to take a norm of"):
        nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
    assert nn.utils.get_total_norm(one.grad for one in plain.parameters() if one.grad is not None) > 0
    assert nn.utils.get_total_norm(torch.ones(4)) == 2
    assert nn.utils.clip_grad_norm_(frozen().parameters(), 1.0) == 0
    del optimizer
    gc.collect()
    assert nn.utils.get_total_norm([]) == 0


def test_clipping_of_other_models_is_torchs_own() -> None:
    """Norms and gradients come out as before, of a model beside one with an optimizer in backward."""
    optimizer = OptimizerInBackward(mlp(), SGD)
    plain = mlp()
    backward(plain)
    gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    expected = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    norm = clip_grad_norm_(plain.parameters(), 1e-3)
    assert torch.allclose(norm, expected)
    assert torch.allclose(nn.utils.get_total_norm(gradients), torch.tensor(1e-3), rtol=1e-2)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_(nn.Tanh().parameters(), 1.0)
    optimizer.close()


def fails(_: Tensor) -> Tensor:
    """Fail as any code of a backward pass may."""
    message = "planted"
    raise ValueError(message)


@every_granularity
@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("steps", [True, False])
def test_what_a_failed_backward_pass_left_is_dropped(
    granularity: Granularity, steps: bool, place: int, skips: bool
) -> None:
    """step() says so and applies nothing of it, zero_grad() drops it; then training goes on as any would."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, granularity, bucket_bytes=80, skip_nonfinite=skips)
    train(model, optimizer, 1)
    handle = list(model.parameters())[place].register_hook(fails)
    with pytest.raises(ValueError, match="planted"):
        backward(model)
    handle.remove()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    if place == 3:  # the first that has a gradient: nobody else had one
        assert all(parameter.grad is None for parameter in model.parameters())
    elif steps:
        with pytest.raises(BackwardError, match="backward pass ended in an error"):
            optimizer.step()
    optimizer.zero_grad()
    assert alike(plain, model)
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer, 2)
    train(plain, SGD(list(plain.parameters())), 2)
    assert alike(plain, model)


@pytest.mark.parametrize("again", [True, False])
def test_a_failed_pass_leaves_nothing_to_whom_the_model_goes(again: bool) -> None:
    """Neither does a second pass add to it, nor does an ordinary optimizer find it behind close()."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, "bucket")
    handle = layer(model, 0).bias.register_hook(fails)
    with pytest.raises(ValueError, match="planted"):
        backward(model)
    handle.remove()
    before = weights(model)
    if again:
        with pytest.raises(BackwardError, match="second gradient in one step"):
            backward(model)
    optimizer.close()
    assert equal(before, weights(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_update_that_fails_is_a_failed_pass() -> None:
    """An error of the rule, in a hook or at the end of the pass, is said again by step()."""
    for granularity in get_args(Granularity):
        model = mlp()
        optimizer = OptimizerInBackward(model, SGD, granularity)
        optimizer.param_groups[0]["lr"] = "none"
        with pytest.raises(TypeError):
            backward(model)
        optimizer.param_groups[0]["lr"] = 0.1
        with pytest.raises(BackwardError, match="backward pass ended in an error"):
            optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())
        train(model, optimizer, 1)


def test_a_grad_scaler_is_refused() -> None:
    """Its scaled gradients have been used when it could take the scale out; switched off it does no harm."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(rows()).square().mean()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(BackwardError, match=r"GradScaler.*must be loaded again"):
        scaler.step(optimizer)
    optimizer.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(rows()).square().mean()).backward()
    off.step(optimizer)


def test_a_step_without_a_backward_pass_is_refused() -> None:
    """Neither before the first pass nor twice after it; gradients of torch.autograd.grad are not used."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    with pytest.raises(BackwardError, match=r"call backward\(\) first"):
        optimizer.step()
    backward(model)
    optimizer.step()
    torch.autograd.grad(model(rows()).sum(), list(model.parameters()))
    with pytest.raises(BackwardError, match=r"call backward\(\) first"):
        optimizer.step()


def test_a_closure_is_refused() -> None:
    """It would be evaluated behind the update."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    backward(model)
    with pytest.raises(BackwardError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_gradients_that_are_to_be_differentiated_are_refused() -> None:
    """A graph of gradients would be one of weights that change."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    with pytest.raises(BackwardError, match="create_graph"):
        model(rows()).square().mean().backward(create_graph=True)
    optimizer.close()


def test_an_optimizer_that_nobody_holds_is_missed() -> None:
    """A backward pass without it says so, and leaves no gradient; another one may be made."""
    model = mlp()
    OptimizerInBackward(model, SGD)
    gc.collect()
    before = weights(model)
    with pytest.raises(BackwardError, match="is gone: hold a reference"):
        backward(model)
    assert equal(before, weights(model))
    assert all(parameter.grad is None for parameter in model.parameters())
    train(model, OptimizerInBackward(model, SGD), 1)


def test_a_closed_optimizer_says_so() -> None:
    """Its step is refused: nothing is updated any more."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    optimizer.close()
    backward(model)
    with pytest.raises(BackwardError, match="closed"):
        optimizer.step()


def test_a_parameter_that_begins_to_learn_is_missed() -> None:
    """What was frozen when the optimizer was made would never be updated."""
    model = mlp()
    model[0].requires_grad_(requires_grad=False)
    optimizer = OptimizerInBackward(model, SGD)
    train(model, optimizer, 1)
    layer(model, 0).weight.requires_grad_()
    backward(model)
    with pytest.raises(BackwardError, match=r"0\.weight did not learn"):
        optimizer.step()


def test_copies_and_new_groups_are_refused() -> None:
    """Hooks would stay behind, or not be there."""
    optimizer = OptimizerInBackward(mlp(), SGD)
    with pytest.raises(BackwardError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    with pytest.raises(BackwardError, match="cannot be copied"):
        pickle.dumps(optimizer)
    with pytest.raises(BackwardError, match="groups cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def frozen() -> nn.Module:
    """Make a model that does not learn."""
    return mlp().requires_grad_(requires_grad=False)


def used() -> nn.Module:
    """Make a model with gradients."""
    model = mlp()
    backward(model)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (frozen, "no parameter that learns"),
        (used, r"0\.weight, .*with a gradient already"),
        (lambda: nn.LazyLinear(3), "weight, bias: without a shape yet"),
        (lambda: Mock(spec=nn.parallel.DistributedDataParallel), "DistributedDataParallel"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_model_that_cannot_be_trained_so_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    """The error says which parameter, and what about it."""
    model = make()
    if isinstance(model, Mock):
        parameters = [("weight", nn.Parameter(torch.ones(1)))]
        model.named_parameters.return_value, model.modules.return_value = parameters, [model]
    with pytest.raises(ValueError, match=message):
        OptimizerInBackward(model, SGD)


def test_a_parameter_has_one_optimizer() -> None:
    """A second one of the same model, or of a part of it, is refused while the first is there."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD)
    with pytest.raises(ValueError, match=r"weight, bias: updated inside the backward pass already"):
        OptimizerInBackward(model[0], SGD)
    optimizer.close()
    OptimizerInBackward(model, SGD).close()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda parameters: torch.optim.SGD(parameters[1:], 0.1), r"lacks 0\.weight"),
        (lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.ones(1))], 0.1), "not given"),
        (partial(torch.optim.LBFGS, lr=0.1), "LBFGS evaluates the model itself"),
    ],
)
def test_a_rule_that_cannot_be_used_in_parts_is_refused(rule: Rule, message: str) -> None:
    """The rule's optimizer must hold just the parameters that it is given, and need no closure."""
    with pytest.raises(ValueError, match=message):
        OptimizerInBackward(mlp(), rule)


def test_an_unknown_granularity_is_refused() -> None:
    """The error lists the known ones."""
    granularity: Granularity = "layer"  # type: ignore[assignment]  # that is the mistake
    with pytest.raises(ValueError, match="'layer'; there are: parameter, bucket, module"):
        OptimizerInBackward(mlp(), SGD, granularity)


def saved(model: nn.Module) -> tuple[Optimizer, dict[str, object]]:
    """Return the state of an optimizer in backward after a step, and the optimizer."""
    optimizer = OptimizerInBackward(model, ADAM)
    train(model, optimizer, 1)
    return optimizer, optimizer.state_dict()


def test_a_state_of_another_model_is_refused() -> None:
    """By its names, by the shapes of what it holds, or by how many parameters it is of."""
    optimizer, state = saved(mlp())
    before = copy.deepcopy(state)
    names, shapes, numbers = (copy.deepcopy(state) for _ in range(3))
    groups = [dict(one["param_groups"][0]) for one in (names, shapes, numbers)]  # type: ignore[index]  # a list
    groups[0]["param_names"] = ["0.weight", "0.bias", "4.weight", "4.bias"]
    groups[1]["param_names"] = ["2.weight", "0.bias", "0.weight", "2.bias"]
    groups[2].pop("param_names")
    groups[2]["params"] = [0, 1]
    for bad, group, message in zip(
        (names, shapes, numbers),
        groups,
        (r"lacks 2\.bias, 2\.weight and knows 4\.bias", "exp_avg of", "another number of parameters"),
        strict=True,
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**bad, "param_groups": [group]})
    assert str(optimizer.state_dict()) == str(before)
