"""Training with RigL: masks, weights and optimizer state, saved states, refused uses, several ranks."""

import copy
import gc
import itertools
import math
import operator
import os
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.optim.lr_scheduler import LambdaLR

from impls.training.memory_reclaim import call_in_fresh_process
from impls.training.optimizer_in_backward import BackwardError, OptimizerInBackward, Rule
from impls.training.rigl import RigLInBackward, RigLScheduler, Schedule, entry_state
from tests.training.models import (
    SETTINGS,
    SGD,
    SparseTraining,
    equal,
    has_no_gradient,
    same_entries,
    text_model,
    train_rank,
    weights,
    words,
)

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"_momentum": 0.9, "_nesterov": True, "_weight_decay": 1e-3}),
    (torch.optim.Adam, {"_amsgrad": True}),
    (torch.optim.Adam, {"_eps": 0.0}),
    (torch.optim.RMSprop, {"_centered": True, "_momentum": 0.9}),
    (torch.optim.Adagrad, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Rprop, {}),
]


def test_when_and_how_many_entries_move() -> None:
    """Every delta steps before T_end, alpha / 2 (1 + cos(pi t / T_end)) of the active entries move."""
    for end, delta, expected in (
        (75, 5, list(range(5, 75, 5))),
        (76, 5, list(range(5, 80, 5))),
        (4, 1, [1, 2, 3]),
    ):
        schedule = Schedule(0.1, end, delta)
        assert [step for step in range(100) if schedule.updates_at(step)] == expected
    for static in (Schedule(0.1, 75, 5, static_topo=True), Schedule(0.1, static_topo=True)):
        assert not any(map(static.updates_at, range(1000)))
    for passes, expected in ((1, [4, 9]), (2, [3, 4, 8, 9]), (4, [1, 2, 3, 4, 6, 7, 8, 9])):
        schedule = Schedule(0.1, 11, 5, grad_accumulation_n=passes)
        assert [step for step in range(20) if schedule.accumulates_after(step)] == expected
        random = Schedule(0.1, 11, 5, grad_accumulation_n=passes, growth="random")
        assert not any(map(random.accumulates_after, range(20)))
    # The cosine of a third of pi is 1/2.
    for step, share in {0: 0.6, 25: 0.45, 50: 0.15, 75: 0.0, 80: 0.0}.items():
        assert Schedule(0.1, 75, 5, alpha=0.6).fraction(step) == pytest.approx(share)


def test_the_optimizer_steps_where_no_entry_moves() -> None:
    """With static masks the optimizer takes every step; training a dense model is bitwise plain training."""
    training = SparseTraining(T_end=75)
    steps: list[int] = []
    training.optimizer.register_step_post_hook(lambda *_: steps.append(training.scheduler.step))
    assert training.run(last=80) == list(range(5, 75, 5))
    assert steps == [step for step in range(1, 81) if step % 5 or step >= 75]
    static = SparseTraining(static_topo=True, T_end=None)
    masks = static.masks
    assert static.run() == []
    assert equal(static.masks, masks)
    assert static.is_masked
    dense, plain = SparseTraining(dense_allocation=1.0, _momentum=0.9), text_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    assert dense.run() == []
    for step in range(30):
        optimizer.zero_grad()
        plain(words(step)).square().mean().backward()
        optimizer.step()
    assert equal(dense.weights, weights(plain))


def layer_tensors(training: SparseTraining) -> list[list[Tensor]]:
    """Return each sparse weight with its optimizer state."""
    sparse = [layer.weight for layer in training.scheduler.layers]
    return [[weight, *entry_state(training.optimizer, weight)] for weight in sparse]


def test_updates_zero_new_entries_and_keep_the_others() -> None:
    """Updates are in place, bitwise, in weights and in the state of any optimizer; gradients are masked."""
    for optimizer, settings in OPTIMIZERS:
        training = SparseTraining(optimizer, **settings)
        addresses: list[int] = []
        for step in range(11):
            training.backward(step)
            assert training.has_masked_gradients
            before = [[tensor.detach().clone() for tensor in tensors] for tensors in layer_tensors(training)]
            old_masks = training.masks
            if training.scheduler():
                training.optimizer.step()
            else:
                assert training.has_masked_gradients  # by the new mask
                assert not equal(training.masks, old_masks)
                most = training.scheduler.schedule.fraction(step + 1)
                for now, then, mask, old in zip(
                    layer_tensors(training), before, training.masks, old_masks, strict=True
                ):
                    stays = mask & old
                    assert int((mask & ~old).sum()) <= most * int(old.sum())
                    for tensor, earlier in zip(now, then, strict=True):
                        assert torch.equal(tensor[stays], earlier[stays]), optimizer
                        assert not tensor[~stays].any(), optimizer
            assert training.is_masked, optimizer
            now_at = [tensor.data_ptr() for tensors in layer_tensors(training) for tensor in tensors]
            addresses = addresses or now_at
            assert now_at == addresses
        assert training.scheduler.updates == 2


def test_resumed_training_equals_straight_training(tmp_path: Path) -> None:
    """Training may be cut between updates, right after one, and between a backward pass and its update.

    States are copies in plain types, which torch.load reads by default; states of other models are refused.
    """
    for optimizer, settings in (OPTIMIZERS[0], OPTIMIZERS[1]):
        for cut, growth, creates in ((7, "gradient", True), (9, "gradient", False), (10, "random", True)):
            options = settings | {"grad_accumulation_n": 3, "growth": growth}
            straight, first = SparseTraining(optimizer, **options), SparseTraining(optimizer, **options)
            straight.run(last=16)
            first.run(last=cut)
            if cut == 9:
                first.backward(cut)  # the next call updates from this gradient and earlier ones
            state = first.scheduler.state_dict()
            before = str(state)
            torch.save([first.model.state_dict(), first.optimizer.state_dict(), state], tmp_path / "it")
            model, slots, loaded = torch.load(tmp_path / "it", weights_only=True)
            second = SparseTraining(optimizer, seed=1, mask_seed=5, **options | {"delta": 6, "T_end": 7})
            second.model.load_state_dict(model)
            second.optimizer.load_state_dict(slots)
            if creates:
                second.scheduler.close()
                second.scheduler = RigLScheduler(second.model, second.optimizer, state_dict=loaded)
            else:
                second.scheduler.load_state_dict(loaded)
            for training in (first, second):
                if cut == 9:
                    assert not training.scheduler()
                training.run(first=10 if cut == 9 else cut, last=16)
                assert equal(training.weights, straight.weights)
                assert equal(training.masks, straight.masks)
            assert str(state) == str(loaded) == before
    two_layers = nn.Sequential(nn.Linear(20, 24), nn.Linear(24, 16))
    scheduler = RigLScheduler(two_layers, SGD(list(two_layers.parameters())), **SETTINGS)
    kept = weights(two_layers)
    with pytest.raises(ValueError, match=r"the sparse weight .* in the saved state"):
        scheduler.load_state_dict(state)
    assert equal(weights(two_layers), kept)


def test_a_new_mask_zeroes_weights_and_state_of_dense_training() -> None:
    """A first mask, a new scheduler and a loaded state zero weights and optimizer state."""
    saved = SparseTraining(mask_seed=3).scheduler.state_dict()
    for way in ("first", "create", "load"):
        training = SparseTraining(torch.optim.Adam)
        training.run(last=3)
        if way != "load":
            training.scheduler.close()
        for tensors in layer_tensors(training):
            for tensor in tensors:
                tensor.data.fill_(0.5)
        if way == "load":
            training.scheduler.load_state_dict(saved)
        else:
            state = {"state_dict": saved} if way == "create" else SETTINGS | {"seed": 3}
            training.scheduler = RigLScheduler(training.model, training.optimizer, **state)
        assert equal(training.masks, [*saved["masks"].values()])
        for tensors, mask in zip(layer_tensors(training), training.masks, strict=True):
            assert len(tensors) == 3
            assert all(torch.equal(tensor, 0.5 * mask) for tensor in tensors)


def test_dense_gradients_of_the_last_passes_decide_which_entries_grow() -> None:
    """Gradients of the last passes are summed; torch.autograd.grad and a closure that raises do not count."""
    training = SparseTraining(grad_accumulation_n=3)
    gradients: list[list[Tensor]] = []
    for step in range(5):
        if step >= 2:
            gradients.append(training.dense_gradients(step))
        training.backward(step)
        training.dense_gradients(7)
        if step < 4 and training.scheduler():
            training.optimizer.step()
            with pytest.raises(ZeroDivisionError):
                training.optimizer.step(lambda: 1 / 0)
    totals = [sum(of_layer, torch.tensor(0.0)) for of_layer in zip(*gradients, strict=True)]
    for layer, total in zip(training.scheduler.layers, totals, strict=True):
        torch.testing.assert_close(layer.accumulated, total)
    # Both weights of a sum have the very same gradient tensor: it is gathered twice.
    pair = nn.Sequential(nn.Linear(6, 5), nn.Linear(6, 5))
    scheduler = RigLScheduler(pair, SGD(list(pair.parameters())), **SETTINGS, grad_accumulation_n=3)
    scheduler()
    scheduler()
    x = torch.randn(4, 6)
    for _ in range(2):
        (x @ (pair[0].get_parameter("weight") + pair[1].get_parameter("weight")).T).sum().backward()
    for layer in scheduler.layers:
        torch.testing.assert_close(layer.accumulated, 2 * x.sum(0).expand(5, 6))


def test_closures_work() -> None:
    """With closures gradients and weights are masked, and entries move where gradients are large."""
    training = SparseTraining(_momentum=0.9)
    old_masks, moved = training.masks, []
    for step in range(30):
        gradients = training.dense_gradients(step)
        if training.scheduler():
            training.optimizer.step(partial(training.backward, step))
        else:
            moved.append(step + 1)
        assert training.is_masked
        if step == 3:
            for layer, gradient in zip(training.scheduler.layers, gradients, strict=True):
                torch.testing.assert_close(layer.accumulated, gradient)
    assert moved == [5, 10, 15, 20]
    assert not any(same_entries(training.masks, old_masks))


def test_settings_out_of_range_are_refused() -> None:
    """An error names the setting and leaves the model alone; settings that move no entry give a warning."""
    model = text_model()
    optimizer = SGD(list(model.parameters()))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dense_allocation": 0}, "dense_allocation 0: expected a share of the weights in (0, 1]"),
        ({"T_end": None}, "T_end None: expected the step"),
        ({"T_end": 7.5}, "T_end 7.5: expected the step from which entries stay, a whole number"),
        ({"delta": 2.5}, "delta 2.5: expected a whole number of steps"),
        ({"grad_accumulation_n": 5}, "grad_accumulation_n 5: expected a whole number from 1 to 4, less than"),
        ({"grad_accumulation_n": 1.5}, "grad_accumulation_n 1.5: expected a whole number from 1 to 4"),
        ({"alpha": 1.5}, "alpha 1.5: expected a share of the active entries"),
        *(
            ({name: "1"}, f"{name} '1': expected {kind}")
            for name, kind in (
                ("dense_allocation", "a share of the weights"),
                ("static_topo", "True or False"),
                ("T_end", "the step"),
                ("delta", "a whole number of steps"),
                ("alpha", "a share of the active entries"),
                ("grad_accumulation_n", "a whole number from 1 to 4"),
            )
        ),
        ({"ignore": "head"}, "ignore must be a list of names, got 'head': pass ['head']"),
        ({"ignore_linear_layers": "False"}, "ignore_linear_layers 'False': expected True or False"),
        ({"growth": "weight"}, "growth 'weight': expected gradient or random"),
        ({"ignore": ["head"]}, "no module 'head'; closest are "),
        ({"ignore": ["2", "5", "7"]}, "no linear or convolutional layer"),
        ({"ignore_linear_layers": True}, "left out: pass ignore_linear_layers=False"),
    ]
    for settings, message in refused:
        with pytest.raises(ValueError, match=re.escape(message)):
            RigLScheduler(model, optimizer, **SETTINGS | settings)
    with pytest.raises(ValueError, match="LBFGS is not supported: its history"):
        RigLScheduler(model, torch.optim.LBFGS(model.parameters()), **SETTINGS)
    partly = SGD(list(model.get_submodule("2").parameters()))
    with pytest.raises(ValueError, match=r"does not have 5\.weight, 7\.weight: ignore them"):
        RigLScheduler(model, partly, **SETTINGS)
    assert equal(weights(model), weights(text_model()))
    RigLScheduler(model, partly, ignore=["5", "7"], **SETTINGS)
    never: dict[str, Any] = {"T_end": 5, "dense_allocation": 0.1, "ignore_linear_layers": False}
    with pytest.warns(RuntimeWarning, match="at step 100, but updates end before step T_end = 5"):
        RigLScheduler(model, optimizer, **never).close()
    RigLScheduler(model, optimizer, **never, static_topo=True)


def test_calls_written_for_rigl_torch_mean_the_same() -> None:
    """Settings have their places and defaults, and attributes their names; whole numbers may be floats.

    ``uniform`` leaves the first layer of the network dense.
    """
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 10))
    optimizer = SGD(list(model.parameters()))
    settings: list[Any] = [0.1, 0.75 * 20, "uniform", True, 3, 0.2, 1, 2]
    scheduler = RigLScheduler(model, optimizer, *settings)
    assert [layer.name for layer in scheduler.layers] == ["1.weight"]
    assert (scheduler.model, scheduler.optimizer, scheduler.rigl_steps) == (model, optimizer, 0)
    assert all(map(operator.is_, scheduler.W, (model[index].weight for index in (0, 1, 3))))
    assert scheduler.N == [216, 576, 320]
    assert scheduler.S[1] == pytest.approx(518 / 576)
    first, mask, last = scheduler.backward_masks
    assert first is last is None
    assert torch.equal(mask, scheduler.layers[0].mask)  # type: ignore[arg-type]  # its weight is sparse
    expected = Schedule(0.1, 15, delta=3, alpha=0.2, static_topo=True, grad_accumulation_n=2)
    assert scheduler.schedule == expected
    scheduler.close()
    settings[6:] = 0, 2.0
    RigLScheduler(model, optimizer, *settings).close()
    scheduler = RigLScheduler(model, optimizer, 0.1, T_end=15, delta=3, ignore=["0"])
    assert [layer.name for layer in scheduler.layers] == ["1.weight"]
    scheduler.close()
    scheduler = RigLScheduler(model, optimizer, 0.1, 15, delta=3, ignore_linear_layers=False)
    assert [layer.name for layer in scheduler.layers] == ["1.weight", "3.weight"]
    state = scheduler.state_dict()
    scheduler.close()
    scheduler = RigLScheduler(model, optimizer, state_dict=state)  # the state has the setting
    assert [layer.name for layer in scheduler.layers] == ["1.weight", "3.weight"]
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: save its state_dict\(\)"):
        copy.deepcopy(scheduler)
    scheduler.close()
    assert not RigLScheduler(model, optimizer, T_end=15, delta=3).layers  # all dense by default


def test_a_state_of_rigl_torch_is_loaded() -> None:
    """Masks, settings and steps go on; a state with other weights, or other sparse weights, is refused."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.Conv2d(2, 3, 3),
        nn.Flatten(),
        nn.Linear(48, 10),
        nn.Linear(10, 2),
    )
    optimizer, mask = SGD(list(model.parameters())), torch.arange(54).view(3, 2, 3, 3) % 3 == 0
    state: dict[str, Any] = {
        "dense_allocation": 1 / 3,
        "S": [0, 2 / 3, 0, 0],
        "N": [18, 54, 480, 20],
        "hyperparams": {
            "delta_T": 4,
            "alpha": 0.5,
            "T_end": 12,
            "ignore_linear_layers": True,
            "static_topo": False,
            "sparsity_distribution": "uniform",
            "grad_accumulation_n": 2,
        },
        "step": 7,
        "rigl_steps": 1,
        "backward_masks": [None, mask, None, None],
        "_linear_layers_mask": [0, 0, 1, 1],
    }
    scheduler = RigLScheduler(model, optimizer, state_dict=state)
    assert scheduler.schedule == Schedule(1 / 3, 12, delta=4, alpha=0.5, grad_accumulation_n=2)
    assert (scheduler.step, scheduler.updates) == (7, 1)
    assert [layer.name for layer in scheduler.layers] == ["2.weight"]
    assert torch.equal(model.get_parameter("2.weight") != 0, mask)
    model(torch.linspace(0, 1, 64).view(1, 1, 8, 8)).square().sum().backward()
    assert not scheduler()
    assert scheduler.updates == 2
    assert not torch.equal(scheduler.layers[0].mask, mask)
    scheduler.load_state_dict(state)
    assert torch.equal(scheduler.layers[0].mask, mask)
    with pytest.raises(
        ValueError, match=re.escape("entries, and the model has [18, 54, 480, 20]: load a state")
    ):
        scheduler.load_state_dict({**state, "N": [18, 54, 480]})
    saved = scheduler.state_dict()
    for foreign, key in (
        ({}, "ignore_linear_layers"),
        ({"backward_masks": []}, "hyperparams"),
        (saved, "masks"),
    ):
        foreign.pop("masks", None)
        with pytest.raises(ValueError, match=f"^not the state of a RigLScheduler, because it has no '{key}'"):
            scheduler.load_state_dict(foreign)
        with pytest.raises(ValueError, match=f"^not the state of a RigLScheduler, because it has no '{key}'"):
            RigLScheduler(model, optimizer, state_dict=foreign)
    scheduler.close()
    with pytest.raises(
        ValueError, match=r"2\.weight is \(3, 2, 3, 3\) in the saved state and missing in the model"
    ):
        RigLScheduler(model, optimizer, ignore=["2"], state_dict=state)


def test_a_model_has_one_scheduler() -> None:
    """A second scheduler for an optimizer or a weight is refused until the first is closed or deleted.

    After a scheduler is closed, inactive entries learn again.
    """
    first = SparseTraining()
    optimizer = SGD(list(first.model.parameters()))
    with pytest.raises(ValueError, match=r"the optimizer, .*already managed by another RigLScheduler"):
        RigLScheduler(first.model, first.optimizer, **SETTINGS)
    with pytest.raises(ValueError, match=r"2\.weight, .*already managed by another RigLScheduler"):
        RigLScheduler(first.model, optimizer, **SETTINGS)
    with pytest.raises(ValueError, match=r"weight.*already managed by another RigLScheduler"):
        OptimizerInBackward(first.model.get_submodule("5"), SGD)
    first.scheduler.close()
    first.backward(4)
    first.optimizer.step()
    first.optimizer.zero_grad()
    assert not first.is_masked
    second = RigLScheduler(first.model, first.optimizer, **SETTINGS)
    first.scheduler.close()
    with pytest.raises(ValueError, match="already managed"):
        RigLScheduler(first.model, first.optimizer, **SETTINGS)
    del second
    inside = RigLInBackward(first.model, SGD, **SETTINGS)
    with pytest.raises(ValueError, match="already managed by another OptimizerInBackward"):
        RigLScheduler(first.model, optimizer, **SETTINGS)
    inside.close()
    RigLScheduler(first.model, optimizer, **SETTINGS)


def test_updates_without_a_finite_gradient_move_nothing() -> None:
    """Any bad pass gives a warning, also after its state was loaded, and the next update works."""
    for bad_step, bad in ((3, math.nan), (4, math.inf)):
        training = SparseTraining(grad_accumulation_n=2)
        training.run(last=3)
        before, old_masks = training.weights, training.masks
        for step in (3, 4):
            training.backward(step, scale=bad if step == bad_step else 1.0)
            training.scheduler.load_state_dict(training.scheduler.state_dict())
            if step == 3:
                training.scheduler()
        with pytest.warns(RuntimeWarning, match=r"step 5: masks did not change, .*: 2\.weight, 5\.weight"):
            assert not training.scheduler()
        assert equal(training.weights, before)
        assert equal(training.masks, old_masks)
        assert training.run(first=5) == [10, 15, 20]
        assert not equal(training.masks, old_masks)
    unused = SparseTraining(delta=1)
    with pytest.warns(RuntimeWarning, match="no finite gradient"):
        assert not unused.scheduler()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_inactive_entries_are_zero_whatever_their_gradient_is(bad: float) -> None:
    """A non-finite gradient of an inactive entry leaves its gradient, momentum and weight zero."""
    training = SparseTraining(_momentum=0.9, _weight_decay=0.1)
    layer = training.scheduler.layers[0]
    index, value = tuple((~layer.mask).nonzero()[0]), torch.tensor(bad)
    handle = layer.weight.register_hook(lambda gradient: gradient.index_put(index, value))
    training.backward(0)
    handle.remove()
    assert layer.weight.grad is not None
    assert layer.weight.grad[~layer.mask].eq(0).all()
    training.scheduler()
    training.optimizer.step()
    tensors = [layer.weight, *entry_state(training.optimizer, layer.weight)]
    assert len(tensors) == 2
    assert all(tensor[~layer.mask].eq(0).all() for tensor in tensors)
    training.scheduler.close()
    training.backward(1)
    training.optimizer.step()
    assert all(parameter.isfinite().all() for parameter in training.weights)


@pytest.mark.parametrize("unscales", [True, False])
def test_training_with_grad_scaler_is_bitwise_training_without(unscales: bool) -> None:
    """The scaler is updated in each step if gradients are unscaled, otherwise in steps of the optimizer."""
    plain, training = SparseTraining(), SparseTraining()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(30):
        plain.backward(step)
        training.optimizer.zero_grad()
        scaler.scale(training.model(words(step)).square().mean()).backward()
        if unscales:
            scaler.unscale_(training.optimizer)
            for model in (plain.model, training.model):
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if plain.scheduler():
            plain.optimizer.step()
        if takes_step := training.scheduler():
            scaler.step(training.optimizer)
        if unscales or takes_step:
            scaler.update()
    assert training.scheduler.updates == 4
    assert equal(training.masks, plain.masks)
    assert equal(training.weights, plain.weights)


def test_nothing_leaks() -> None:
    """Models, schedulers and training runs are freed by reference counting alone."""
    gc.disable()
    try:
        outside = SparseTraining()
        outside.run(last=6)
        model = text_model()
        inside = RigLInBackward(model, partial(torch.optim.Adam, lr=0.01), **SETTINGS)
        model(words(0)).square().mean().backward()
        inside()
        references = [weakref.ref(each) for each in (outside.model, outside.scheduler, model, inside)]
        del outside, model, inside
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()


def state_of(training: RigLInBackward | RigLScheduler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of mask, weight and momentum of each layer."""
    layers = [(layer.mask, layer.weight, *entry_state(optimizer, layer.weight)) for layer in training.layers]
    return [tensor.detach().clone() for tensors in layers for tensor in tensors]


def test_training_inside_the_backward_pass_is_that_of_the_scheduler() -> None:
    """The same entries move in the same steps, bitwise, with a schedule; a dense model works."""
    rules: list[Rule] = [
        partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        partial(torch.optim.Adam, lr=0.01, eps=0.0),
    ]
    for rule in rules:
        inside, outside = text_model(), text_model()
        training = RigLInBackward(inside, rule, **SETTINGS)
        optimizer = rule(list(outside.parameters()))
        scheduler = RigLScheduler(outside, optimizer, **SETTINGS)
        optimizers = (training.optimizer, optimizer)
        rates = [LambdaLR(each, lambda step: float(step < 18)) for each in optimizers]
        for step in range(25):
            inside(words(step)).square().mean().backward()
            optimizer.zero_grad()
            outside(words(step)).square().mean().backward()
            if takes_step := scheduler():
                optimizer.step()
            assert training() is takes_step
            for schedule in rates:
                schedule.step()
            assert has_no_gradient(inside)
            assert equal(state_of(training, training.optimizer), state_of(scheduler, optimizer))
        assert equal(weights(inside), weights(outside))
    dense = RigLInBackward(text_model(), rules[0], **SETTINGS | {"dense_allocation": 1.0})
    assert not dense.layers


def test_a_non_finite_gradient_in_backward_leaves_its_layer_unchanged() -> None:
    """A layer with such a gradient keeps weight, momentum and mask in any step; other layers continue."""
    for step, bad in itertools.product((2, 4), (torch.nan, torch.inf)):
        model = text_model()
        training = RigLInBackward(model, partial(torch.optim.SGD, lr=0.05, momentum=0.9), **SETTINGS)
        for earlier in range(step):
            model(words(earlier)).square().mean().backward()
            training()
        before = state_of(training, training.optimizer)
        first = training.layers[0]
        index = tuple((~first.mask).nonzero()[0])  # an inactive entry counts too
        value = torch.tensor(bad)
        handle = first.weight.register_hook(
            lambda gradient, index=index, value=value: gradient.index_put(index, value)
        )
        model(words(step)).square().mean().backward()
        handle.remove()
        if step == 4:
            with pytest.warns(RuntimeWarning, match=r"step 5: masks did not change, .*: 2\.weight"):
                assert not training()
        else:
            assert training()
        now = state_of(training, training.optimizer)
        assert equal(now[:3], before[:3])
        changed = slice(3, None, 3) if step == 4 else slice(4, None, 3)
        assert not any(same_entries(now[changed], before[changed]))
        assert training.optimizer.skipped == {"2.weight": 1, "2.bias": 1}
        model(words(step + 1)).square().mean().backward()
        training()
        assert not torch.equal(first.weight, before[1])


def test_unsupported_uses_inside_the_backward_pass_are_refused() -> None:
    """Averaged gradients, steps without a backward pass and second passes raise errors."""
    model = text_model()
    with pytest.raises(ValueError, match="grad_accumulation_n must be 1"):
        RigLInBackward(model, SGD, **SETTINGS, grad_accumulation_n=2)
    assert equal(weights(model), weights(text_model()))
    training = RigLInBackward(model, SGD, **SETTINGS | {"delta": 1})
    with pytest.raises(BackwardError, match="no gradient has arrived since the last step"):
        training()
    model(words(0)).square().mean().backward()
    before = state_of(training, training.optimizer)
    with pytest.raises(BackwardError, match="has a second gradient in one step"):
        model(words(1)).square().mean().backward()
    assert equal(state_of(training, training.optimizer), before)
    training.close()
    model(words(1)).square().mean().backward()
    assert not has_no_gradient(model)


def test_all_ranks_have_the_same_masks(tmp_path: Path) -> None:
    """Masks are equal although weights, rows and seeds differ, and they change.

    The second rank is an isolated call, which gets its environment variables and whose result comes back.
    """
    before = dict(os.environ)
    with ThreadPoolExecutor() as thread:
        second_rank = thread.submit(
            call_in_fresh_process, train_rank, 1, str(tmp_path), environment={"PLANTED": "yes"}
        )
        first, *_ = train_rank(0, str(tmp_path))
    second, pid, planted = second_rank.result()
    assert (pid != os.getpid(), planted, dict(os.environ)) == (True, "yes", before)
    assert all(map(equal, first, second))
    assert not any(map(equal, first[::2], first[1::2]))
    assert not equal(first[1], first[3])  # the second rank's rows count


def test_a_wrapped_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    """DistributedDataParallel and torch.compile do not change the names in a state."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'it'}", rank=0, world_size=1)
    try:
        model = text_model()
        compiled: Any = torch.compile(model, backend="eager")
        for wrapped in (nn.parallel.DistributedDataParallel(model), compiled):
            optimizer, settings = (
                SGD(list(model.parameters())),
                SETTINGS | {"sparsity_distribution": "uniform"},
            )
            scheduler = RigLScheduler(wrapped, optimizer, **settings)
            assert [layer.name for layer in scheduler.layers] == ["5.weight", "7.weight"]
            scheduler.close()
    finally:
        distributed.destroy_process_group()
