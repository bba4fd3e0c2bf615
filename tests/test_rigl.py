"""Training with RigL: what holds of weights, slots and masks, step by step."""

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impls.training.connections import slots
from impls.training.rigl import RigLScheduler
from tests.rigl_cases import STEPS, Training, equal, masks, network, rows, weights

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"_momentum": 0.9, "_nesterov": True, "_weight_decay": 1e-3}),
    (torch.optim.Adam, {"_amsgrad": True}),
    (torch.optim.Adam, {"_eps": 0.0}),
    (torch.optim.AdamW, {}),
    (torch.optim.RMSprop, {"_centered": True, "_momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]
any_optimizer = pytest.mark.parametrize(
    ("optimizer", "settings"), OPTIMIZERS, ids=lambda one: getattr(one, "__name__", "")
)


def state(training: Training) -> list[tuple[Tensor, list[Tensor]]]:
    """Return copies of each sparse weight and of its slots."""
    return [
        (one.weight.detach().clone(), [slot.clone() for slot in slots(training.optimizer, one.weight)])
        for one in training.scheduler.layers
    ]


@any_optimizer
def test_an_update_zeroes_what_is_new_and_leaves_survivors_as_they_are(
    optimizer: Any, settings: dict[str, Any]
) -> None:
    """Bitwise, with slots of any optimizer; as many connections as before, and what is kept was one."""
    training = Training(optimizer, **settings)
    for step in range(STEPS):
        training.backward(step)
        before, old = state(training), masks(training.scheduler)
        if training.scheduler():
            training.optimizer.step()
        else:
            for (weight, kept), (earlier, held), mask, was in zip(
                state(training), before, masks(training.scheduler), old, strict=True
            ):
                assert int(mask.sum()) == int(was.sum())
                stays = mask & was
                assert int(stays.sum()) >= math.floor(0.7 * int(was.sum()))
                for now, then in ((weight, earlier), *zip(kept, held, strict=True)):
                    assert torch.equal(now[stays], then[stays])
                    assert not now[~stays].any()
        for layer in training.scheduler.layers:
            assert not layer.weight[~layer.mask].any()
            assert int(layer.mask.sum()) == layer.kept
    assert training.scheduler.updates == 4


def test_connections_move_at_their_steps_and_the_optimizer_takes_the_others() -> None:
    """With delta 5 and T_end 75 at 5, 10, ..., 70: a step of topology is none of gradient."""
    training = Training(T_end=75)
    taken: list[int] = []
    training.optimizer.register_step_post_hook(lambda *_: taken.append(training.scheduler.step))
    assert training.run(last=80) == list(range(5, 75, 5))
    assert taken == [step for step in range(1, 81) if step % 5 or step >= 75]


def test_connections_do_move() -> None:
    """As many as the cosine says of each layer at the first update, but for those that come back."""
    training = Training(alpha=0.5)
    old = masks(training.scheduler)
    training.run(last=5)
    share = 0.25 * (1 + math.cos(math.pi * 5 / 25))
    for layer, was in zip(training.scheduler.layers, old, strict=True):
        assert 0 < int((layer.mask & ~was).sum()) <= int(share * layer.kept)


def test_static_connections_stay() -> None:
    """No step is lost, and what is not connected stays zero."""
    training = Training(static_topo=True, T_end=None)
    old = masks(training.scheduler)
    assert training.run() == []
    assert equal(masks(training.scheduler), old)
    assert all(not layer.weight[~layer.mask].any() for layer in training.scheduler.layers)


@pytest.mark.parametrize("distribution", ["uniform", "erk"])
def test_with_all_connections_training_is_plain_training(distribution: str) -> None:
    """Bitwise, and no step is lost to an update that could move nothing."""
    sparse = Training(dense_allocation=1.0, sparsity_distribution=distribution, _momentum=0.9)
    plain = network()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    assert sparse.run() == []
    for step in range(STEPS):
        optimizer.zero_grad()
        plain(rows(step)).square().mean().backward()
        optimizer.step()
    assert equal(weights(sparse), [one.detach() for one in plain.parameters()])


@any_optimizer
@pytest.mark.parametrize("cut", [7, 9, 10])
@pytest.mark.parametrize("growth", ["gradient", "random"])
def test_a_resumed_run_equals_a_straight_one(
    optimizer: Any, settings: dict[str, Any], cut: int, growth: str
) -> None:
    """Cut between updates, while gradients are gathered, and right behind an update; bitwise."""
    settings = settings | {"grad_accumulation_n": 3, "growth": growth}
    if growth == "random" and "_eps" in settings:
        settings["_eps"] = 1e-30  # what is grown where there is no gradient would be 0 / 0
    straight = Training(optimizer, **settings)
    straight.run()
    first = Training(optimizer, **settings)
    first.run(last=cut)
    saved = first.model.state_dict(), first.optimizer.state_dict(), first.scheduler.state_dict()
    second = Training(optimizer, seed=1, **settings | {"delta": 6, "T_end": 7, "drawn": 5})
    second.scheduler.close()
    second.model.load_state_dict(saved[0])
    second.optimizer.load_state_dict(saved[1])
    second.scheduler = RigLScheduler(second.model, second.optimizer, state_dict=saved[2])
    second.run(first=cut)
    assert equal(weights(second), weights(straight))
    assert equal(masks(second.scheduler), masks(straight.scheduler))


def test_a_state_can_be_loaded_into_a_scheduler_and_stored_in_a_file(tmp_path: Any) -> None:
    """By torch's own means, without anything but tensors and numbers in it."""
    straight, first, second = Training(), Training(), Training(seed=3, delta=4)
    straight.run()
    first.run(last=8)
    torch.save([one.state_dict() for one in (first.model, first.optimizer, first.scheduler)], tmp_path / "it")
    model, optimizer, scheduler = torch.load(tmp_path / "it", weights_only=True)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    second.scheduler.load_state_dict(scheduler)
    second.run(first=8)
    assert equal(weights(second), weights(straight))


def test_a_state_is_a_snapshot() -> None:
    """It does not follow the training that goes on."""
    training = Training(grad_accumulation_n=2)
    training.run(last=4)
    training.backward(4)
    saved = training.scheduler.state_dict()
    kept = copy.deepcopy(saved)
    training.run(first=4)
    assert saved["step"] == kept["step"] == 4
    assert equal(list(saved["masks"].values()), list(kept["masks"].values()))
    for name, (gathered, passes, stands_in) in saved["gathered"].items():
        assert (passes, stands_in) == kept["gathered"][name][1:] == (2, False)
        assert torch.equal(gathered, kept["gathered"][name][0])


def with_rates(is_first: bool, state: dict[str, Any] | None = None) -> tuple[Training, Any]:
    """Make a training with a learning-rate scheduler, which is made before RigL's or after it."""
    training = Training.__new__(Training)
    training.model = network()
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1, momentum=0.9)
    asked: dict[str, Any] = {"state_dict": state} if state else {"dense_allocation": 0.2, "T_end": 25}
    rates = None
    for makes_rates in (is_first, not is_first):
        if makes_rates:
            rates = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: float(step < 12))
        else:
            training.scheduler = RigLScheduler(training.model, training.optimizer, delta=5, **asked)
    return training, rates


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("cut", [8, 10])
def test_learning_rate_schedulers_work_made_before_or_after(is_first: bool, cut: int) -> None:
    """The rate that an update is taken with is the scheduler's, and a resumed run is a straight one."""
    straight, rates = with_rates(is_first)
    seen = []
    for step in range(20):
        if step == cut:
            parts = (straight.model, straight.optimizer, rates)
            states = copy.deepcopy([one.state_dict() for one in (*parts, straight.scheduler)])
        before = weights(straight)
        straight.step(step)
        rates.step()
        seen.append(not equal(weights(straight), before))
    assert seen == [step < 12 or step == 14 for step in range(20)]  # connections move at the 15th
    resumed, rates = with_rates(is_first, states[-1])
    for one, state in zip((resumed.model, resumed.optimizer, rates), states, strict=False):
        one.load_state_dict(state)
    for step in range(cut, 20):
        resumed.step(step)
        rates.step()
    assert equal(weights(resumed), weights(straight))
    assert equal(masks(resumed.scheduler), masks(straight.scheduler))


def test_clipping_sees_the_sparse_gradient_alone() -> None:
    """What is not connected adds nothing to the common norm."""
    training = Training()
    training.backward(0)
    for layer in training.scheduler.layers:
        assert layer.weight.grad is not None
        assert not layer.weight.grad[~layer.mask].any()
        assert layer.weight.grad[layer.mask].any()


def test_behind_an_update_the_gradient_is_that_of_the_new_connections() -> None:
    """What was dropped has none, so whoever clips or steps all the same finds no other."""
    training = Training(alpha=1.0)
    training.run(last=4)
    training.backward(4)
    old = masks(training.scheduler)
    assert not training.scheduler()
    for layer, was in zip(training.scheduler.layers, old, strict=True):
        assert layer.weight.grad is not None
        assert (was & ~layer.mask).any()
        assert not layer.weight.grad[~layer.mask].any()
        assert layer.weight.grad[layer.mask].any()


def test_weights_and_slots_stay_where_they_are() -> None:
    """Their storage is that of before, so graphs and other optimizers still see them."""
    training = Training(torch.optim.Adam)
    training.run(last=1)

    def places() -> list[int]:
        held = [one for layer in state_of(training) for one in layer]
        return [one.data_ptr() for one in held]

    before = places()
    training.run(first=1)
    assert places() == before


def state_of(training: Training) -> list[list[Tensor]]:
    """Return each sparse weight, its mask and its slots, as they are."""
    return [
        [one.weight, one.mask, *slots(training.optimizer, one.weight)] for one in training.scheduler.layers
    ]


def test_gradients_of_the_last_steps_are_averaged() -> None:
    """What grows at step 5 is what the mean of three dense gradients says, those of steps 3, 4 and 5."""
    training = Training(grad_accumulation_n=3)
    layer, dense = training.scheduler.layers[0], list[Tensor]()
    for step in range(5):
        twin = copy.deepcopy(training.model)
        weight = twin.get_parameter(layer.name)
        dense += torch.autograd.grad(twin(rows(step)).square().mean(), weight)
        if step < 4:
            training.step(step)
    training.backward(4)
    assert layer.gathered is not None
    mean = torch.stack(dense[2:]).mean(0)
    torch.testing.assert_close(layer.gathered / layer.passes, mean)
    before = layer.mask.clone()
    training.scheduler()
    grown = layer.mask & ~before
    assert mean[grown].abs().min() >= mean[~layer.mask].abs().max()


def test_the_summary_says_what_is_really_zero() -> None:
    """Uniform at 90 % leaves the first layer dense: 61 % of an MLP for digits."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters())
    text = str(RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=75, delta=5))
    assert "8192/8192" in text
    assert "1639/16384" in text
    assert "9959/25856 of these weights are not zero, a sparsity of 61.48%" in text
    assert "every 5 steps before 75" in text


def test_nothing_outlives_its_last_name() -> None:
    """Model, optimizer and scheduler are gone as soon as they are deleted, without the garbage collector."""
    gc.disable()
    try:
        training = Training()
        training.run()
        gone = [weakref.ref(one) for one in (training.model, training.scheduler)]
        del training
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_gradients_that_two_layers_share_are_gathered_apart() -> None:
    """Of a sum of two weights both have the very same gradient: each is added up by itself."""
    layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 5))
    settings: dict[str, Any] = {"dense_allocation": 0.2, "T_end": 25, "delta": 5, "grad_accumulation_n": 3}
    optimizer = torch.optim.SGD(layers.parameters())
    scheduler = RigLScheduler(layers, optimizer, sparsity_distribution="erk", **settings)
    for _ in range(2):
        scheduler()
    x = torch.randn(4, 6)
    for _ in range(2):
        (x @ (layers[0].get_parameter("weight") + layers[1].get_parameter("weight")).T).sum().backward()
    for layer in scheduler.layers:
        torch.testing.assert_close(layer.gathered, 2 * x.sum(0).expand(5, 6))
