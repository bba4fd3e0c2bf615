"""Optimizers that update inside the backward pass: same weights as an ordinary one, and what they refuse."""

import copy
import gc
import itertools
import pickle
import weakref
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from impls.benchmark.training.workload import peak_gradient_bytes
from impls.training.implicit_optimizer import ImplicitOptimizer
from impls.training.optimizer_in_backward import BackwardError, Granularity, OptimizerInBackward, Rule
from tests.training.models import (
    ADAM,
    GRANULARITIES,
    MOMENTUM,
    RULES,
    SGD,
    alike,
    backward,
    equal,
    fails,
    has_no_gradient,
    implicit,
    layer,
    mlp,
    rows,
    same_entries,
    spoilt,
    train,
    weights,
)

every_granularity = pytest.mark.parametrize("granularity", GRANULARITIES)
AFTER_ERROR = "backward pass ended in an error"


def grouped(parameters: list[nn.Parameter]) -> Optimizer:
    """Decay weights but not biases, which have another learning rate."""
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one.ndim > 1]},
        {"params": [one for one in parameters if one.ndim == 1], "weight_decay": 0.0, "lr": 0.1},
    ]
    return torch.optim.AdamW(groups, lr=0.01)


@every_granularity
def test_weights_and_state_are_bitwise_those_of_an_ordinary_optimizer(granularity: Granularity) -> None:
    """With every rule, kernel, and with parameter groups; no gradient is left."""
    rules: list[Rule] = [grouped]
    for rule, kernels in RULES.values():
        rules += [partial(rule, foreach=False), *(partial(rule, **{kernel: True}) for kernel in kernels)]
    for rule in rules:
        plain, model = mlp(), mlp()
        ordinary = rule(list(plain.parameters()))
        optimizer = OptimizerInBackward(model, rule, granularity, bucket_bytes=100)
        train(plain, ordinary, 4)
        train(model, optimizer, 4)
        assert alike(plain, model), rule
        assert has_no_gradient(model)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert ordinary.state[one].keys() == optimizer.state[other].keys()
            for slot, value in ordinary.state[one].items():
                assert value is None or torch.equal(value, optimizer.state[other][slot]), (rule, slot)


class Crossed(nn.Module):
    """One layer's weight comes first in the backward pass and its bias last, with another layer between."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Any:
        return self.inner(nn.functional.linear(x, self.outer.weight).tanh()) * self.outer.bias


class Tied(nn.Module):
    """One layer that is used twice, possibly in checkpoints."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        """Create the layers."""
        super().__init__()
        self.layer, self.back, self.reentrant = layer(mlp(), 0), nn.Linear(8, 4, bias=False), reentrant

    @override
    def forward(self, x: Tensor) -> Any:
        def once(x: Tensor) -> Any:
            return self.back(self.layer(x).tanh())

        for _ in range(2):
            x = once(x) if self.reentrant is None else checkpoint(once, x, use_reentrant=self.reentrant)
        return x


class Checkpointed(nn.Module):
    """Every layer in a reentrant checkpoint, whose backward pass is inside that of the model."""

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.model = mlp()

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for part in self.model:
            x = checkpoint(part, x, use_reentrant=True)
        return x


@every_granularity
def test_shared_and_checkpointed_layers_are_updated_once(granularity: Granularity) -> None:
    """A parameter is updated when its gradient is complete, whatever is updated in between."""
    for make in (Crossed, Tied, partial(Tied, reentrant=False), Checkpointed):
        plain = make()
        model = copy.deepcopy(plain)
        train(plain, ADAM(list(plain.parameters())), 3)
        train(model, OptimizerInBackward(model, ADAM, granularity, bucket_bytes=1), 3)
        assert alike(plain, model)
    tied = Tied(reentrant=True)
    optimizer = OptimizerInBackward(tied, SGD, granularity)
    with pytest.raises(BackwardError, match="reentrant checkpoints of a shared layer"):
        tied(rows().requires_grad_()).sum().backward()
    optimizer.close()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@every_granularity
def test_an_error_after_a_reentrant_checkpoint_is_noticed(granularity: Granularity) -> None:
    """The pass inside the checkpoint has ended then, but not the one around it; also two checkpoints deep."""
    for ends_step, is_nested in itertools.product((True, False), (True, False)):
        model = mlp()
        optimizer = OptimizerInBackward(model, SGD, granularity)
        inside = partial(checkpoint, model[2], use_reentrant=True) if is_nested else model[2]
        y = model[:2](rows())
        y.register_hook(fails)
        with pytest.raises(ValueError, match="planted"):
            checkpoint(inside, y, use_reentrant=True).sum().backward()
        if ends_step:
            with pytest.raises(BackwardError, match=AFTER_ERROR):
                optimizer.step()
        optimizer.zero_grad()
        assert has_no_gradient(model)
        before = weights(model)
        checkpoint(inside, model[:2](rows()), use_reentrant=True).sum().backward()
        optimizer.step()
        assert not any(same_entries(before, weights(model)))


@every_granularity
def test_the_pass_updates_what_it_reaches_and_uses_old_weights_itself(granularity: Granularity) -> None:
    """Incomplete layers and buckets are updated at its end; gradients of inputs see no new weights."""
    model, x = mlp(), rows().requires_grad_()
    model.add_module("unused", nn.Linear(2, 2))
    expected = torch.autograd.grad(model[:3](x).square().mean(), x)[0]
    before = weights(model)
    optimizer = OptimizerInBackward(model, partial(torch.optim.Adam, lr=100.0), granularity)
    y = nn.functional.linear(x, layer(model, 0).weight) + layer(model, 0).bias
    layer(model, 2)(y.tanh()).square().mean().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
    assert same_entries(before, weights(model)) == [False] * 4 + [True] * 2
    assert has_no_gradient(model)
    assert len(optimizer.state) == 4
    optimizer.step()


def test_bytes_of_gradients_alive_at_once() -> None:
    """Those of the largest parameter, layer or bucket, exactly; with the guard, of whole layers."""
    parameter, one_layer, everything = 4 * 32, 4 * (32 + 8), 4 * (32 + 8 + 16 + 2)
    cases: list[tuple[Granularity, int, int, int]] = [
        ("parameter", 0, parameter, one_layer),
        ("module", 0, one_layer, one_layer),
        # Gradients arrive in the order 8 (bias), 64 (weight), 32 (bias), 128 (weight) bytes.
        ("bucket", 1, parameter, one_layer),
        ("bucket", 8 + 64, one_layer, one_layer),
        ("bucket", 8 + 64 + 1, parameter, everything),
        ("bucket", 8 + 64 + 32 + 1, everything, everything),
    ]
    for (granularity, size, *expected), skips in itertools.product(cases, (False, True)):
        model = mlp()
        optimizer = OptimizerInBackward(model, SGD, granularity, bucket_bytes=size, skip_nonfinite=skips)
        found = peak_gradient_bytes(model.parameters(), partial(backward, model))
        assert found == expected[skips], (granularity, size, skips)
        optimizer.close()


def test_learning_rate_schedules_and_states_are_those_of_the_ordinary_optimizer() -> None:
    """Bitwise; a state can be loaded by the other kind, by name or position, and is copied."""
    for rule in (MOMENTUM, ADAM, grouped):
        plain, model = mlp(), mlp()
        ordinary, optimizer = rule(list(plain.parameters())), OptimizerInBackward(model, rule)
        groups = list(optimizer.param_groups)
        schedules = [CosineAnnealingLR(ordinary, 8), CosineAnnealingLR(optimizer, 8)]
        for step in range(8):
            if step == 4:
                states = copy.deepcopy(ordinary.state_dict()), optimizer.state_dict()
                kept = copy.deepcopy(states[0])
                optimizer.load_state_dict(states[0])
                ordinary.load_state_dict(states[1])
            train(plain, ordinary, 1, step)
            train(model, optimizer, 1, step)
            for schedule in schedules:
                schedule.step()
        assert alike(plain, model)
        assert str(states[0]) == str(kept)
        assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    model = implicit()
    whole = ImplicitOptimizer(model)
    rates = LambdaLR(whole, lambda step: float(step == 0))
    train(model, whole)
    rates.step()
    before = weights(model)
    train(model, whole)
    assert equal(before, weights(model))


def test_states_are_matched_by_name() -> None:
    """A model with its parameters in another order, and layers with their own optimizers, take them over."""

    class Reordered(nn.Module):
        def __init__(self, model: nn.Sequential) -> None:
            super().__init__()
            self.add_module("2", model[2])
            self.add_module("0", model[0])

        @override
        def forward(self, x: Tensor) -> Any:
            return self.get_submodule("2")(self.get_submodule("0")(x).tanh())

    model = mlp()
    optimizer = OptimizerInBackward(model, ADAM)
    train(model, optimizer, 2)
    other = Reordered(copy.deepcopy(model))
    moved = OptimizerInBackward(other, ADAM)
    moved.load_state_dict(optimizer.state_dict())
    layered = implicit()
    layered.load_state_dict({name.replace(".", ".layer."): one for name, one in model.state_dict().items()})
    joint = ImplicitOptimizer(layered)
    state = optimizer.state_dict()
    names = [name.replace(".", ".layer.") for name in state["param_groups"][0]["param_names"]]
    state["param_groups"][0]["param_names"] = names
    joint.load_state_dict(state)
    assert [name for group in joint.state_dict()["param_groups"] for name in group["param_names"]] == names
    joint.load_state_dict(joint.state_dict())
    for one, its in ((model, optimizer), (other, moved), (layered, joint)):
        train(one, its, 2, 2)
    assert alike(model, nn.Sequential(other.get_submodule("0"), other.get_submodule("2")))
    assert alike(model, layered)


def test_states_of_other_models_are_refused() -> None:
    """In an error that names what differs; nothing is loaded."""

    def unname(state: Any) -> None:
        del state["param_groups"][0]["param_names"]
        state["param_groups"][0]["params"] = [0]

    def rename(state: Any) -> None:
        state["param_groups"][0]["param_names"][0] = "4.weight"

    damages: list[tuple[Any, str]] = [
        (unname, "no parameter names and another number of parameters"),
        (rename, r"the state of another model: it differs in .*4\.weight"),
        (lambda state: state["param_groups"].append({"params": [9], "param_names": ["9.bias"]}), r"9\.bias"),
    ]
    whole, layers = mlp(), implicit()
    for model, optimizer in ((whole, OptimizerInBackward(whole, ADAM)), (layers, ImplicitOptimizer(layers))):
        train(model, optimizer)
        before = str(optimizer.state_dict())
        for damage, message in damages:
            state = copy.deepcopy(optimizer.state_dict())
            damage(state)
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(state)
            assert str(optimizer.state_dict()) == before
    state = OptimizerInBackward(mlp(), grouped).state_dict()
    with pytest.raises(ValueError, match="one group here, several in the state"):
        OptimizerInBackward(mlp(), ADAM).load_state_dict(state)


@every_granularity
def test_a_non_finite_gradient_leaves_its_layer_unchanged_and_no_other(granularity: Granularity) -> None:
    """Whichever parameter of the layer has it and wherever a bucket ends; later steps continue."""
    for place, bucket_bytes, bad in itertools.product(range(4), (1, 9, 10**6), (torch.nan, torch.inf)):
        model = mlp()
        optimizer = OptimizerInBackward(model, ADAM, granularity, bucket_bytes=bucket_bytes)
        train(model, optimizer, 2)
        before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
        with spoilt(list(model.parameters())[place], bad):
            train(model, optimizer)
        kept = [place < 2, place < 2, place >= 2, place >= 2]
        assert same_entries(before, weights(model)) == kept
        now = optimizer.state_dict()["state"]
        assert [torch.equal(state[key]["exp_avg"], now[key]["exp_avg"]) for key in range(4)] == kept
        names = ("0.weight", "0.bias") if place < 2 else ("2.weight", "2.bias")
        assert optimizer.skipped == dict.fromkeys(names, 1)
        train(model, optimizer)
        assert not any(same_entries(before, weights(model)))


class PartlyCheckpointed(nn.Module):
    """A layer that uses its weight inside a reentrant checkpoint, and its bias outside."""

    def __init__(self) -> None:
        """Create the parameters."""
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))

    @override
    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda y: y @ self.weight, x + self.bias, use_reentrant=True)


@every_granularity
def test_layers_that_share_or_compute_a_weight_are_one_layer(granularity: Granularity) -> None:
    """A tied weight joins two, a weight norm's parts belong to their layer, checkpoints split none."""
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    layer(tied, 2).weight = layer(tied, 0).weight
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    cases: list[tuple[nn.Module, str, int]] = [
        (tied, "2.bias", 3),
        (normed, "0.bias", 3),
        (PartlyCheckpointed(), "bias", 2),
    ]
    for model, bad, size in cases:
        before = weights(model)
        optimizer = OptimizerInBackward(model, ADAM, granularity, bucket_bytes=1)
        with spoilt(model.get_parameter(bad)):
            train(model, optimizer)
        assert same_entries(before, weights(model)) == [place < size for place in range(len(before))]
        train(model, optimizer)
        assert not any(same_entries(before, weights(model)))


def test_the_guard_recognises_all_kinds_of_gradients() -> None:
    """Finite ones whose sum overflows, infinities that cancel, complex and sparse ones; or is disabled."""
    complex_linear = partial(nn.Linear, 2, 2, dtype=torch.complex64)
    cancelling = torch.tensor([[torch.inf, -torch.inf]])
    cases: list[tuple[Any, Tensor, float, bool]] = [
        *((partial(nn.Linear, 4, 1, bias=False), torch.ones(1, 4), scale, True) for scale in (3e38, -3e38)),
        (partial(nn.Linear, 4, 1, bias=False), torch.ones(1, 4), torch.inf, False),
        (partial(nn.Linear, 2, 1, bias=False), cancelling, 1.0, False),
        (complex_linear, torch.ones(1, 2, dtype=torch.complex64), 1.0, True),
        (complex_linear, torch.ones(1, 2, dtype=torch.complex64), torch.nan, False),
    ]
    for make, x, scale, moves in cases:
        model = make()
        before = weights(model)
        optimizer = OptimizerInBackward(model, SGD)
        y = model(x)
        ((y.imag if y.is_complex() else y).sum() * scale).backward()
        assert equal(before, weights(model)) is not moves
        assert bool(optimizer.skipped) is not moves
    plain = nn.Embedding(5, 3, sparse=True)
    words = copy.deepcopy(plain)
    for one, its in ((plain, SGD(list(plain.parameters()))), (words, OptimizerInBackward(words, SGD))):
        one(torch.tensor([1, 1, 4])).square().sum().backward()
        its.step()
    assert alike(plain, words)
    unguarded = mlp()
    optimizer = OptimizerInBackward(unguarded, SGD, skip_nonfinite=False)
    with spoilt(layer(unguarded, 2).bias):
        train(unguarded, optimizer)
    assert bool(layer(unguarded, 2).bias.isnan().all())


@every_granularity
def test_a_second_backward_pass_in_a_step_is_refused(granularity: Granularity) -> None:
    """Gradients cannot be accumulated; weights stay as the first pass left them."""
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, granularity, bucket_bytes=100)
    backward(model, 0)
    before = weights(model)
    with pytest.raises(BackwardError, match=r"second gradient in one step.*step\(\) after each"):
        backward(model, 1)
    assert equal(before, weights(model))
    assert has_no_gradient(model)
    loss = model(rows()).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    with pytest.raises(BackwardError, match="create_graph"):
        model(rows()).square().mean().backward(create_graph=True)


@every_granularity
def test_what_a_failed_pass_leaves_is_dropped(granularity: Granularity) -> None:
    """step() and another pass say so, zero_grad() and close() do not; later training is not affected."""
    endings = ("step", "zero_grad", "close", "pass")
    for place, skips, ending in itertools.product(range(4), (True, False), endings):
        model = mlp()
        optimizer = OptimizerInBackward(model, SGD, granularity, bucket_bytes=80, skip_nonfinite=skips)
        train(model, optimizer)
        handle = list(model.parameters())[place].register_hook(fails)
        with pytest.raises(ValueError, match="planted"):
            backward(model)
        handle.remove()
        plain = copy.deepcopy(model)
        if ending == "close":
            optimizer.close()
            optimizer = OptimizerInBackward(model, SGD, granularity)
        elif ending == "zero_grad" or place == 3:  # place 3 fails first: no gradient has arrived
            optimizer.zero_grad()
        elif ending == "step":
            with pytest.raises(BackwardError, match=AFTER_ERROR):
                optimizer.step()
        else:
            with pytest.raises(BackwardError, match="second gradient in one step"):
                backward(model)
        assert alike(plain, model)
        assert has_no_gradient(model)
        train(model, optimizer, 2)
        train(plain, SGD(list(plain.parameters())), 2)
        assert alike(plain, model)
    model = mlp()
    optimizer = OptimizerInBackward(model, SGD, granularity)
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises(TypeError):
        backward(model)
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(BackwardError, match=AFTER_ERROR):
        optimizer.step()
    train(model, optimizer)


def test_gradients_left_by_others_are_dropped() -> None:
    """Set by hand, or left by another hook that failed: step() and the next pass say so."""
    for by_hand, ending in itertools.product((True, False), ("step", "pass", "zero_grad")):
        model, plain = mlp(), mlp()
        last = layer(model, 2).bias
        handle = last.register_post_accumulate_grad_hook(fails)
        optimizer = OptimizerInBackward(model, SGD)
        if by_hand:
            last.grad = torch.ones(2)
        else:
            with pytest.raises(ValueError, match="planted"):
                backward(model)
        handle.remove()
        if ending == "step":
            with pytest.raises(BackwardError, match=r"2\.bias: unused gradient"):
                optimizer.step()
        elif ending == "pass":
            with pytest.raises(BackwardError, match=r"2\.bias already had a gradient.* is dropped"):
                backward(model)
        else:
            optimizer.zero_grad()
        assert alike(plain, model)
        assert has_no_gradient(model)
        backward(model)
        optimizer.step()
        train(plain, SGD(list(plain.parameters())))
        assert alike(plain, model)
    layer(model, 0).weight.grad = torch.ones(8, 4)
    with pytest.raises(BackwardError, match=r"0\.weight already had a gradient.* is dropped"):
        backward(model)  # its other gradients came first
    assert has_no_gradient(model)
    with pytest.raises(BackwardError, match=r"call backward\(\) first"):
        optimizer.step()
    train(model, optimizer)


@every_granularity
def test_nothing_leaks(granularity: Granularity) -> None:
    """Model, parameters and optimizer are freed by reference counting, with a schedule, closed or not."""
    for closes in (True, False):
        model = mlp()
        optimizer = OptimizerInBackward(model, ADAM, granularity)
        schedule = LambdaLR(optimizer, lambda _: 1.0)
        train(model, optimizer, 2)
        schedule.step()
        references = [weakref.ref(one) for one in (model, layer(model, 0).weight, optimizer)]
        gc.collect()
        gc.disable()
        try:
            if closes:
                optimizer.close()
            del model, optimizer, schedule
            assert [one() for one in references] == [None] * 3
        finally:
            gc.enable()


def test_closed_and_deleted_optimizers() -> None:
    """Once closed, another one continues from its state; once deleted, the next backward pass says so."""
    plain, model = mlp(), mlp()
    ordinary, optimizer = ADAM(list(plain.parameters())), OptimizerInBackward(model, ADAM)
    with pytest.raises(ValueError, match="weight, bias: already managed by another OptimizerInBackward"):
        OptimizerInBackward(model[0], SGD)
    train(plain, ordinary, 2)
    train(model, optimizer, 2)
    optimizer.close()
    other = ADAM(list(model.parameters()))
    other.load_state_dict(optimizer.state_dict())
    train(plain, ordinary, 1, 2)
    train(model, other, 1, 2)
    optimizer.zero_grad()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(BackwardError, match="closed"):
        optimizer.step()
    model.zero_grad()
    again = OptimizerInBackward(model, ADAM)
    again.load_state_dict(other.state_dict())
    train(plain, ordinary, 1, 3)
    train(model, again, 1, 3)
    assert alike(plain, model)
    del again
    gc.collect()
    with pytest.raises(BackwardError, match="was deleted: keep a reference"):
        backward(model)
    assert alike(plain, model)
    assert has_no_gradient(model)
    train(model, OptimizerInBackward(model, SGD))


@pytest.mark.parametrize("is_implicit", [False, True])
def test_calls_that_cannot_work_are_refused(is_implicit: bool) -> None:
    """Closures, scaled gradients, steps without a pass, copies and new groups."""
    model: nn.Sequential = implicit(SGD) if is_implicit else mlp()
    optimizer: Any = ImplicitOptimizer(model) if is_implicit else OptimizerInBackward(model, SGD)
    with pytest.raises(BackwardError, match=r"call backward\(\) first"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(rows()).square().mean()).backward()
    with pytest.raises(BackwardError, match="closure"):
        optimizer.step(lambda: 0.0)
    scaler.unscale_(optimizer)
    with pytest.raises(BackwardError, match=r"GradScaler.*must be loaded again"):
        scaler.step(optimizer)
    optimizer.step()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(model(rows()).square().mean()).backward()
    off.step(optimizer)
    torch.autograd.grad(model(rows()).sum(), list(model.parameters()))
    with pytest.raises(BackwardError, match=r"call backward\(\) first"):
        optimizer.step()
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(BackwardError, match="cannot be copied"):
            copies(optimizer)
    with pytest.raises(BackwardError, match="groups cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


class Counting(torch.optim.SGD):
    """Counts its steps in its parameter groups."""

    @override
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_rules_and_models_that_cannot_work_are_refused() -> None:
    """Rules need all parameters and nothing else; models are trainable, unused, and stay as they were."""
    used, frozen = mlp(), mlp().requires_grad_(requires_grad=False)
    backward(used)
    wrapped = Mock(spec=nn.parallel.DistributedDataParallel)
    wrapped.named_parameters.return_value = [("weight", nn.Parameter(torch.ones(1)))]
    wrapped.modules.return_value = [wrapped]
    unknown: Any = "layer"
    refused: list[tuple[Any, Any, str]] = [
        (mlp(), lambda parameters: torch.optim.SGD(parameters[1:], 0.1), r"it differs in 0\.weight"),
        (mlp(), lambda own: torch.optim.SGD([*own, nn.Parameter(torch.ones(1))], 0.1), "of another model"),
        (mlp(), partial(torch.optim.LBFGS, lr=0.1), "LBFGS evaluates the model itself"),
        (mlp(), SGD([nn.Parameter(torch.ones(1))]), "the rule is a SGD: pass a function"),
        (mlp(), None, "the rule is a NoneType"),
        (frozen, SGD, "no trainable parameter"),
        (used, SGD, r"0\.weight, .*already has a gradient"),
        (nn.LazyLinear(3), SGD, "weight, bias: no shape yet"),
        (wrapped, SGD, "DistributedDataParallel"),
    ]
    for model, rule, message in refused:
        with pytest.raises(ValueError, match=message):
            OptimizerInBackward(model, rule)
    with pytest.raises(ValueError, match="'layer'; there are: parameter, bucket, module"):
        OptimizerInBackward(mlp(), SGD, unknown)
    model = mlp()
    optimizer = OptimizerInBackward(model, partial(Counting, lr=0.1))
    with pytest.raises(BackwardError, match="Counting changes options of its groups"):
        backward(model)
    optimizer.close()
    layer(model, 0).requires_grad_(requires_grad=False)
    optimizer = OptimizerInBackward(model, SGD)
    train(model, optimizer)
    layer(model, 0).weight.requires_grad_()
    backward(model)
    with pytest.raises(BackwardError, match=r"0\.weight: frozen when"):
        optimizer.step()
