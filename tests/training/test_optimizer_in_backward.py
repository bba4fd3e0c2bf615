"""Optimizers that update inside the backward pass: same weights as an ordinary one, and refused uses."""

import copy
import gc
import io
import itertools
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
from impls.training.implicit_optimizer import AutoOptimizer, ImplicitOptimizer
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
AFTER_ERROR, SECOND = "backward pass ended in an error", r"second gradient in one step"


def grouped(parameters: list[nn.Parameter]) -> Optimizer:
    """Decay weights but not biases, which have another learning rate."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    biases = [parameter for parameter in parameters if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": biases, "weight_decay": 0.0, "lr": 0.1}]
    return torch.optim.AdamW(groups, lr=0.01)


@every_granularity
def test_weights_and_state_are_bitwise_those_of_an_ordinary_optimizer(granularity: Granularity) -> None:
    """Weights and state are equal for every rule, kernel and parameter group, and no gradient is left."""
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
        for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            slots = ordinary.state[expected]
            assert slots.keys() == optimizer.state[parameter].keys()
            for slot, value in slots.items():
                assert value is None or torch.equal(value, optimizer.state[parameter][slot]), (rule, slot)


class Crossed(nn.Module):
    """One layer's weight comes first in the backward pass and its bias last, with another layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

    @override
    def forward(self, x: Tensor) -> Any:
        return self.inner(nn.functional.linear(x, self.outer.weight).tanh()) * self.outer.bias


class Tied(nn.Module):
    """One layer that is used twice, possibly in checkpoints."""

    def __init__(self, *, reentrant: bool | None = None, uses: int = 2) -> None:
        super().__init__()
        self.layer, self.back, self.reentrant, self.uses = nn.Linear(4, 8), nn.Linear(8, 4), reentrant, uses

    @override
    def forward(self, x: Tensor) -> Any:
        def once(x: Tensor) -> Any:
            return self.back(self.layer(x).tanh())

        for _ in range(self.uses):
            if self.reentrant is None:
                x = once(x)
            else:
                x = checkpoint(once, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


@every_granularity
def test_shared_and_checkpointed_layers_are_updated_once(granularity: Granularity) -> None:
    """A parameter is updated once, when its gradient is complete."""
    for make in (Crossed, Tied, partial(Tied, reentrant=False), partial(Tied, reentrant=True, uses=1)):
        plain = make()
        model = copy.deepcopy(plain)
        train(plain, ADAM(list(plain.parameters())), 3)
        train(model, OptimizerInBackward(model, ADAM, granularity, bucket_bytes=1), 3)
        assert alike(plain, model)
    tied = Tied(reentrant=True)
    optimizer = OptimizerInBackward(tied, SGD, granularity)
    with pytest.raises(BackwardError, match="reentrant checkpoints of a shared layer"):
        tied(rows()).sum().backward()
    optimizer.close()


@every_granularity
def test_a_pass_updates_layers_that_it_reaches_and_uses_old_weights(granularity: Granularity) -> None:
    """Incomplete layers and buckets are updated when the pass ends; gradients of inputs use old weights."""
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
    """Gradients of the largest parameter, layer or bucket are alive; with the guard, whole layers."""
    parameter, one_layer, everything = 4 * 32, 4 * (32 + 8), 4 * (32 + 8 + 16 + 2)
    cases: list[tuple[Granularity, int, int, int]] = [
        ("parameter", 1, parameter, one_layer),
        ("module", 1, one_layer, one_layer),
        ("bucket", 1, parameter, one_layer),
        ("bucket", 8 + 64, one_layer, one_layer),
        ("bucket", 8 + 64 + 1, parameter, everything),
        ("bucket", 8 + 64 + 32 + 1, everything, everything),
    ]
    for (granularity, size, *expected), skips in itertools.product(cases, (False, True)):
        model = mlp()
        optimizer = OptimizerInBackward(model, SGD, granularity, bucket_bytes=size, skip_nonfinite=skips)
        peak = peak_gradient_bytes(model.parameters(), partial(backward, model))
        assert peak == expected[skips], (granularity, size, skips)
        optimizer.close()


def test_learning_rate_schedules_and_states_are_those_of_the_ordinary_optimizer() -> None:
    """Weights are bitwise equal; each kind can load the other's state, and copies it."""
    for rule in (MOMENTUM, ADAM, grouped):
        plain, model = mlp(), mlp()
        ordinary, optimizer = rule(list(plain.parameters())), OptimizerInBackward(model, rule)
        schedules = [CosineAnnealingLR(ordinary, 8), CosineAnnealingLR(optimizer, 8)]
        for step in range(8):
            if step == 4:
                states = copy.deepcopy(ordinary.state_dict()), optimizer.state_dict()
                before = str(states[0])
                optimizer.load_state_dict(states[0])
                ordinary.load_state_dict(states[1])
            train(plain, ordinary, 1, step)
            train(model, optimizer, 1, step)
            for schedule in schedules:
                schedule.step()
        assert alike(plain, model)
        assert str(states[0]) == before
    model = implicit()
    scheduled = ImplicitOptimizer(model)
    scheduled.load_state_dict(scheduled.state_dict())
    rates = LambdaLR(scheduled, lambda step: float(step == 0))
    train(model, scheduled)
    rates.step()
    before_step = weights(model)
    train(model, scheduled)
    assert equal(before_step, weights(model))


def test_states_of_layers_continue_and_those_of_other_models_are_refused() -> None:
    """Layers with their own optimizers continue from a saved state; other parameters change nothing."""
    model, straight = implicit(), implicit()
    train(straight, ImplicitOptimizer(straight), 4)
    saved = ImplicitOptimizer(model)
    train(model, saved, 2)
    resumed = implicit()
    resumed.load_state_dict(model.state_dict())
    joint = ImplicitOptimizer(resumed)
    joint.load_state_dict(saved.state_dict())
    train(resumed, joint, 2, 2)
    assert alike(straight, resumed)
    for optimizer in (OptimizerInBackward(mlp(), ADAM), joint):
        before = str(optimizer.state_dict())
        renamed = copy.deepcopy(optimizer.state_dict())
        renamed["param_groups"][0]["param_names"][0] = "4.weight"
        without_names = {"state": {}, "param_groups": [{"params": [0]}]}
        for wrong, message in (
            (renamed, r"has 4\.weight, .* instead of 0\."),
            (without_names, r"groups of sizes \[1\], the model \[[24]"),
        ):
            with pytest.raises(ValueError, match=message):
                optimizer.load_state_dict(wrong)
            assert str(optimizer.state_dict()) == before


@every_granularity
def test_a_non_finite_gradient_leaves_only_its_layer_unchanged(granularity: Granularity) -> None:
    """A non-finite gradient of any parameter skips its layer, wherever a bucket ends; later steps train."""
    for index, bucket_bytes in itertools.product(range(4), (1, 10**6)):
        model = mlp()
        optimizer = OptimizerInBackward(model, ADAM, granularity, bucket_bytes=bucket_bytes)
        train(model, optimizer, 2)
        before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
        with spoilt(list(model.parameters())[index], torch.inf if index % 2 else torch.nan):
            train(model, optimizer)
        unchanged = [index < 2, index < 2, index >= 2, index >= 2]
        assert same_entries(before, weights(model)) == unchanged
        now = optimizer.state_dict()["state"]
        assert [torch.equal(state[key]["exp_avg"], now[key]["exp_avg"]) for key in range(4)] == unchanged
        names = ("0.weight", "0.bias") if index < 2 else ("2.weight", "2.bias")
        assert optimizer.skipped == dict.fromkeys(names, 1)
        train(model, optimizer)
        assert not any(same_entries(before, weights(model)))


def test_the_guard_recognizes_all_kinds_of_gradients() -> None:
    """Finite gradients whose sum overflows are taken; infinities that cancel and complex NaN are not."""
    real, complex_ = partial(nn.Linear, bias=False), partial(nn.Linear, 2, 2, dtype=torch.complex64)
    cases: list[tuple[Any, Tensor, float, bool]] = [
        (partial(real, 4, 1), torch.ones(1, 4), 3e38, True),
        (partial(real, 4, 1), torch.ones(1, 4), torch.inf, False),
        (partial(real, 2, 1), torch.tensor([[torch.inf, -torch.inf]]), 1.0, False),
        (complex_, torch.ones(1, 2, dtype=torch.complex64), 1.0, True),
        (complex_, torch.ones(1, 2, dtype=torch.complex64), torch.nan, False),
    ]
    for make, x, scale, moves in cases:
        model = make()
        before = weights(model)
        optimizer = OptimizerInBackward(model, SGD)
        y = model(x)
        ((y.imag if y.is_complex() else y).sum() * scale).backward()
        assert equal(before, weights(model)) is not moves
        assert bool(optimizer.skipped) is not moves
    unguarded = mlp()
    optimizer = OptimizerInBackward(unguarded, SGD, skip_nonfinite=False)
    with spoilt(layer(unguarded, 2).bias):
        train(unguarded, optimizer)
    assert bool(layer(unguarded, 2).bias.isnan().all())


def test_the_guard_joins_layers_and_handles_sparse_gradients() -> None:
    """A tied weight joins two layers, a weight norm is part of its layer, and sparse gradients train."""
    plain = nn.Embedding(5, 3, sparse=True)
    words = copy.deepcopy(plain)
    for embedding, optimizer in (
        (plain, SGD(list(plain.parameters()))),
        (words, OptimizerInBackward(words, SGD)),
    ):
        embedding(torch.tensor([1, 1, 4])).square().sum().backward()
        optimizer.step()
    assert alike(plain, words)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    layer(tied, 2).weight = layer(tied, 0).weight
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    for model, bad in ((tied, "2.bias"), (normed, "0.bias")):
        before = weights(model)
        in_backward = OptimizerInBackward(model, ADAM, "bucket", bucket_bytes=1)
        with spoilt(model.get_parameter(bad)):
            train(model, in_backward)
        assert same_entries(before, weights(model)) == [True] * 3 + [False] * 2


@every_granularity
def test_gradients_of_a_failed_pass_are_dropped(granularity: Granularity) -> None:
    """step() and another pass raise an error, zero_grad() and close() do not; then training continues.

    After a pass that did not fail, zero_grad() begins a step as well, for loops that leave out step().
    """
    for index, ending in itertools.product(range(4), ("step", "zero_grad", "close", "pass")):
        model = mlp()
        optimizer = OptimizerInBackward(model, SGD, granularity, bucket_bytes=80)
        train(model, optimizer)
        handle = list(model.parameters())[index].register_hook(fails)
        with pytest.raises(ValueError, match="planted"):
            backward(model)
        handle.remove()
        plain = copy.deepcopy(model)
        if ending == "close":
            optimizer.close()
            optimizer = OptimizerInBackward(model, SGD, granularity)
        elif ending == "zero_grad" or index == 3:  # the last bias comes first: no gradient has arrived
            optimizer.zero_grad()
        elif ending == "step":
            with pytest.raises(BackwardError, match=AFTER_ERROR):
                optimizer.step()
        else:
            with pytest.raises(BackwardError, match=SECOND):
                backward(model)
        assert alike(plain, model)
        assert has_no_gradient(model)
        train(model, optimizer, 2)
        train(plain, SGD(list(plain.parameters())), 2)
        assert alike(plain, model)
        backward(model)
        optimizer.zero_grad()
        train(model, optimizer, 2)
        train(plain, SGD(list(plain.parameters())))
        train(plain, SGD(list(plain.parameters())), 2)
        assert alike(plain, model)


def test_nothing_leaks() -> None:
    """Model, parameters and optimizer are freed by reference counting, with a schedule, closed or not."""
    for granularity, closes in itertools.product(GRANULARITIES, (True, False)):
        model = mlp()
        optimizer = OptimizerInBackward(model, ADAM, granularity)
        schedule = LambdaLR(optimizer, lambda _: 1.0)
        train(model, optimizer, 2)
        schedule.step()
        references = [weakref.ref(each) for each in (model, layer(model, 0).weight, optimizer)]
        gc.collect()
        gc.disable()
        try:
            if closes:
                optimizer.close()
            del model, optimizer, schedule
            assert [reference() for reference in references] == [None] * 3
        finally:
            gc.enable()


def test_closed_and_deleted_optimizers() -> None:
    """An ordinary optimizer continues from a closed one; after a deleted one the next pass raises."""
    plain, model = mlp(), mlp()
    ordinary, optimizer = ADAM(list(plain.parameters())), OptimizerInBackward(model, ADAM)
    for managed in (model, model[0]):
        with pytest.raises(ValueError, match=r"weight, .*already managed by another"):
            OptimizerInBackward(managed, SGD)
    train(plain, ordinary, 2)
    train(model, optimizer, 2)
    optimizer.close()
    outside = ADAM(list(model.parameters()))
    outside.load_state_dict(optimizer.state_dict())
    train(plain, ordinary, 1, 2)
    train(model, outside, 1, 2)
    optimizer.zero_grad()
    assert not has_no_gradient(model)
    with pytest.raises(BackwardError, match="closed"):
        optimizer.step()
    model.zero_grad()
    again = OptimizerInBackward(model, ADAM)
    again.load_state_dict(outside.state_dict())
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
    """Closures, scaled gradients and steps without a backward pass raise errors."""
    model: nn.Sequential = implicit(SGD) if is_implicit else mlp()
    optimizer: Any = ImplicitOptimizer(model) if is_implicit else OptimizerInBackward(model, SGD)
    torch.autograd.grad(model(rows()).sum(), list(model.parameters()))
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


class Counting(torch.optim.SGD):
    """Counts its steps in its parameter groups."""

    @override
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_rules_and_models_that_cannot_work_are_refused() -> None:
    """Rules that need all gradients or leave parameters out, and models that have gradients, are refused."""
    used, frozen = mlp(), mlp().requires_grad_(requires_grad=False)
    backward(used)
    wrapped = Mock(spec=nn.parallel.DistributedDataParallel)
    wrapped.named_parameters.return_value = [("weight", nn.Parameter(torch.ones(1)))]
    wrapped.modules.return_value = [wrapped]
    refused: list[tuple[Any, Any, str]] = [
        (mlp(), lambda parameters: torch.optim.SGD(parameters[1:], 0.1), r"missing or additional: 0\.weight"),
        (mlp(), torch.optim.LBFGS, "LBFGS evaluates the loss several times per step"),
        (frozen, SGD, "empty parameter list"),
        (used, SGD, r"already have a gradient, .*0\.weight"),
        (nn.LazyLinear(3), SGD, "uninitialized parameter"),
        (wrapped, SGD, "DistributedDataParallel"),
    ]
    for model, rule, message in refused:
        with pytest.raises(ValueError, match=message):
            OptimizerInBackward(model, rule)
    model = mlp()
    optimizer = OptimizerInBackward(model, partial(Counting, lr=0.1))
    with pytest.raises(BackwardError, match="Counting changes options of its groups"):
        backward(model)
    optimizer.close()


def test_layers_with_their_own_optimizers_train_like_the_whole_model() -> None:
    """Training is bitwise equal, each with its rule; unused layers and bad gradients do not affect others."""
    for first_rule, last_rule in ((ADAM, ADAM), (MOMENTUM, ADAM)):
        plain, (first, middle, last) = mlp(), mlp()
        ordinary = [first_rule(list(plain[0].parameters())), last_rule(list(plain[2].parameters()))]
        model = nn.Sequential(AutoOptimizer(first, first_rule), middle, AutoOptimizer(last, last_rule))
        optimizer = ImplicitOptimizer(model)
        train(model, optimizer, 3)
        for step in range(3):
            plain.zero_grad()
            backward(plain, step)
            for each in ordinary:
                each.step()
        assert alike(plain, model)
    model[0](rows()).sum().backward()
    optimizer.step()
    before = weights(model)
    with spoilt(model.get_parameter("0.layer.bias")):
        train(model, optimizer)
    assert same_entries(before, weights(model)) == [True, True, False, False]
    for raises in (True, False):
        handle = model.get_parameter("0.layer.weight").register_hook(fails)
        with pytest.raises(ValueError, match="planted"):
            backward(model)
        handle.remove()
        if raises:
            with pytest.raises(BackwardError, match=AFTER_ERROR):
                optimizer.step()
        else:
            optimizer.zero_grad()
        train(model, optimizer)


def test_every_layer_needs_exactly_one_optimizer() -> None:
    """Mixed models and tied layers are refused, as is another optimizer of the model."""
    mixed = nn.Sequential(AutoOptimizer(nn.Linear(4, 8), SGD), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"1\.weight, 1\.bias: not updated inside the backward pass"):
        ImplicitOptimizer(mixed)
    with pytest.raises(ValueError, match=r"0\.layer\.weight, 0\.layer\.bias: already managed"):
        OptimizerInBackward(mixed, SGD)
    tied = nn.Linear(4, 8)
    tied.weight = mixed.get_parameter("0.layer.weight")
    with pytest.raises(ValueError, match="weight: already managed"):
        AutoOptimizer(tied, SGD)


def test_a_copied_layer_continues_independently() -> None:
    """Copies from deepcopy and torch.save own their optimizer's state, and leave the original alone."""
    model = implicit()
    optimizer = ImplicitOptimizer(model)
    train(model, optimizer, 2)
    before, file = weights(model), io.BytesIO()
    torch.save(model.eval(), file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    for copied in copies:
        assert not any(module.training for module in copied.modules())
        train(copied, ImplicitOptimizer(copied), 2, 2)
    assert equal(before, weights(model))
    train(model, optimizer, 2, 2)
    assert all(alike(model, copied) for copied in copies)
