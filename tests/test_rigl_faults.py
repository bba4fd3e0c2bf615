"""What RigL refuses, in words, and what it does about gradients that are no numbers."""

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from impls.training.backward import OptimizerInBackward
from impls.training.connections import slots
from impls.training.rigl import RigLScheduler
from impls.training.rigl_backward import RigLInBackward
from tests.rigl_cases import Training, equal, masks, network, rows, weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense_allocation": 0}, "dense_allocation 0: expected a share"),
        ({"dense_allocation": 1.01}, "dense_allocation 1.01: expected a share"),
        ({"dense_allocation": -0.1}, "dense_allocation -0.1"),
        ({"dense_allocation": math.nan}, "dense_allocation nan"),
        ({"dense_allocation": math.inf}, "dense_allocation inf"),
        ({"dense_allocation": "0.5"}, "dense_allocation '0.5': expected a share of the weights in (0, 1]"),
        ({"dense_allocation": True}, "dense_allocation True: expected a share"),
        ({"dense_allocation": [0.5]}, "dense_allocation [0.5]: expected a share"),
        ({"dense_allocation": None}, "dense_allocation is missing"),
        ({"T_end": None}, "T_end is missing"),
        ({"T_end": 0}, "T_end 0: expected a step"),
        ({"T_end": 7.5}, "T_end 7.5: expected a step"),
        ({"T_end": True}, "T_end True: expected a step"),
        ({"T_end": "75"}, "T_end '75': expected a step"),
        ({"T_end": math.inf}, "T_end inf: expected a step"),
        ({"delta": 0}, "delta 0: expected a number of steps"),
        ({"delta": -5}, "delta -5"),
        ({"delta": 2.5}, "delta 2.5"),
        ({"delta": True}, "delta True"),
        ({"delta": "5"}, "delta '5': expected a number of steps"),
        ({"grad_accumulation_n": 0}, "grad_accumulation_n 0: expected a number of steps in [1, 5)"),
        ({"grad_accumulation_n": 5}, "grad_accumulation_n 5"),
        ({"alpha": 1.5}, "alpha 1.5: expected a share of the connections"),
        ({"alpha": math.nan}, "alpha nan"),
        ({"alpha": "x"}, "alpha 'x': expected a share of the connections in [0, 1]"),
        ({"alpha": None}, "alpha None: expected a share"),
        ({"alpha": True}, "alpha True: expected a share"),
        ({"alpha": 10**400}, "0: expected a share of the connections"),
        ({"seed": "x"}, "seed 'x': expected a whole number"),
        ({"seed": 0.5}, "seed 0.5: expected a whole number"),
        ({"seed": None}, "seed None: expected a whole number"),
        ({"seed": 2**64}, "seed 18446744073709551616: expected a whole number"),
        ({"alpha": -math.inf}, "alpha -inf: expected a share"),
        ({"begin": -1}, "begin -1: expected a step"),
        ({"begin": False}, "begin False: expected a step"),
        ({"begin": 0.0}, "begin 0.0: expected a step"),
        ({"begin": None}, "begin None: expected a step"),
        ({"static_topo": "no"}, "static_topo 'no': expected True or False"),
        ({"grad_accumulation_n": "1"}, "grad_accumulation_n '1': expected a number of steps"),
        ({"sparsity_distribution": "er"}, "there are uniform and erk"),
        ({"sparsity_distribution": ["erk"]}, "sparsity_distribution ['erk']: there are uniform and erk"),
        ({"growth": "weight"}, "there are gradient and random"),
        ({"ignore": ["head"]}, "the model has no head"),
        ({"ignore": "head"}, "the model has no head"),
        ({"ignore": [2]}, "ignore [2]: expected names of layers"),
        ({"ignore": 2}, "ignore 2: expected names of layers"),
        ({"ignore": ["2", "5", "7"]}, "no linear or convolutional layer"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    """The message names it, and the model is as it was."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    asked = {"dense_allocation": 0.1, "T_end": 75, "delta": 5} | settings
    with pytest.raises(ValueError, match=re.escape(message)):
        RigLScheduler(model, optimizer, **asked)
    assert equal([one.detach() for one in model.parameters()], list(network().state_dict().values()))
    RigLScheduler(model, optimizer, dense_allocation=0.1, T_end=75, delta=5)


def test_a_model_without_a_layer_to_make_sparse_is_refused() -> None:
    """Norms and embeddings are none."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3))
    with pytest.raises(ValueError, match="no linear or convolutional layer"):
        RigLScheduler(model, torch.optim.SGD(model.parameters()), dense_allocation=0.1, T_end=5, delta=2)


def test_an_optimizer_that_lacks_a_weight_is_refused() -> None:
    """It would never be trained; ignored it may be missing."""
    model = network()
    optimizer = torch.optim.SGD([*model.get_submodule("2").parameters()])
    asked: dict[str, Any] = {"dense_allocation": 0.1, "T_end": 75, "delta": 5}
    with pytest.raises(ValueError, match=r"does not have 5\.weight, 7\.weight: ignore them"):
        RigLScheduler(model, optimizer, **asked)
    RigLScheduler(model, optimizer, ignore=["5", "7"], **asked)


def test_what_is_no_optimizer_or_no_model_is_refused() -> None:
    """Nor is a function that would make one; the model is as it was."""
    model = network()
    asked: dict[str, Any] = {"dense_allocation": 0.1, "T_end": 75, "delta": 5}
    for wrong, words in ((None, "optimizer None"), (torch.optim.SGD, "optimizer <class")):
        with pytest.raises(ValueError, match=f"{words}.*: expected a torch.optim.Optimizer"):
            RigLScheduler(model, wrong, **asked)  # type: ignore[arg-type]  # the mistake
    assert equal([one.detach() for one in model.parameters()], list(network().state_dict().values()))
    with pytest.raises(ValueError, match=r"model None: expected a torch\.nn\.Module"):
        RigLScheduler(None, torch.optim.SGD(model.parameters()), **asked)  # type: ignore[arg-type]  # the same
    seed: Any = "x"
    with pytest.raises(ValueError, match="seed 'x': expected a whole number"):
        RigLInBackward(model, partial(torch.optim.SGD, lr=0.1), seed=seed, **asked)


def test_a_second_scheduler_is_refused_while_there_is_a_first() -> None:
    """On the optimizer, or on a weight of it; one that was closed, or forgotten, is none."""
    first = Training()
    asked: dict[str, Any] = {"dense_allocation": 0.2, "T_end": 25, "delta": 5}
    with pytest.raises(ValueError, match="this optimizer has a RigLScheduler already"):
        RigLScheduler(first.model, first.optimizer, **asked)
    other = torch.optim.SGD(first.model.parameters())
    with pytest.raises(ValueError, match=r"2\.weight has a RigLScheduler already"):
        RigLScheduler(first.model, other, **asked)
    first.scheduler.close()
    second = RigLScheduler(first.model, first.optimizer, **asked)
    first.scheduler.close()
    with pytest.raises(ValueError, match="this optimizer has a RigLScheduler already"):
        RigLScheduler(first.model, first.optimizer, **asked)
    del second
    assert RigLScheduler(first.model, other, **asked).layers


def test_a_model_that_is_updated_inside_the_backward_pass_is_refused() -> None:
    """Gradients would be used at topology steps; once that optimizer is closed there is room."""
    model = network()
    asked: dict[str, Any] = {"dense_allocation": 0.2, "T_end": 25, "delta": 5}
    inside = OptimizerInBackward(model, partial(torch.optim.SGD, lr=0.1))
    with pytest.raises(ValueError, match=r"2\.weight, .*updated inside .*RigLInBackward is for that"):
        RigLScheduler(model, inside, **asked)
    inside.close()
    RigLScheduler(model, partial(torch.optim.SGD, lr=0.1)(model.parameters()), **asked)


def test_a_closed_scheduler_lets_go() -> None:
    """Every entry learns again."""
    training = Training()
    training.scheduler.close()
    training.backward(0)
    training.optimizer.step()
    assert all(layer.weight[~layer.mask].any() for layer in training.scheduler.layers)


@pytest.mark.parametrize("growth", ["gradient", "random"])
def test_a_closed_scheduler_does_nothing_more(growth: str) -> None:
    """It neither counts steps nor moves connections nor takes a state; its own can still be saved."""
    training = Training(growth=growth)
    training.run(last=4)
    training.backward(4)
    state = training.scheduler.state_dict()
    training.scheduler.close()
    training.scheduler.close()
    before, old = weights(training), masks(training.scheduler)
    with pytest.raises(RuntimeError, match="this scheduler was closed: make another"):
        training.scheduler()
    with pytest.raises(RuntimeError, match="this scheduler was closed: make another"):
        training.scheduler.load_state_dict(state)
    with pytest.raises(RuntimeError, match="this scheduler was closed: make another"):
        training.scheduler.hold()
    assert equal(weights(training), before)
    assert equal(masks(training.scheduler), old)
    assert str(training.scheduler.state_dict()) == str(state)
    other = RigLScheduler(training.model, training.optimizer, state_dict=training.scheduler.state_dict())
    assert other.step == 4


def test_the_state_of_another_model_is_refused() -> None:
    """By names and by shapes; nothing is changed by it."""
    training = Training()
    other = nn.Sequential(nn.Linear(20, 24), nn.Linear(24, 16))
    optimizer = torch.optim.SGD(other.parameters())
    state = RigLScheduler(other, optimizer, dense_allocation=0.5, T_end=9, delta=3).state_dict()
    before, old = weights(training), masks(training.scheduler)
    with pytest.raises(
        ValueError, match=r"the state is that of another model: it has 0\.weight \(24, 20\), "
    ):
        training.scheduler.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"this is no state of a RigLScheduler: it has no 'schedule', only a"
    ):
        training.scheduler.load_state_dict({"a": 1})
    assert equal(weights(training), before)
    assert equal(masks(training.scheduler), old)
    training.scheduler.close()
    with pytest.raises(ValueError, match="another model"):
        RigLScheduler(training.model, training.optimizer, state_dict=state)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing_and_warns(bad: float) -> None:
    """The optimizer takes no such step either, and the next update finds connections as they were."""
    training = Training()
    training.run(last=4)
    before, old = weights(training), masks(training.scheduler)
    training.optimizer.zero_grad()
    (training.model(rows(4)).square().mean() * bad).backward()
    words = r"topology update at step 5: nothing moved in 2\.weight \(its gradient is not finite\), 5\.weight"
    with pytest.warns(RuntimeWarning, match=words):
        assert not training.scheduler()
    assert equal(weights(training), before)
    assert equal(masks(training.scheduler), old)
    assert training.run(first=5) == [10, 15, 20]
    assert not equal(masks(training.scheduler), old)


def test_an_update_without_a_backward_pass_warns() -> None:
    """There is no gradient that could say what to grow."""
    training = Training(delta=1)
    with pytest.warns(RuntimeWarning, match="no backward pass has reached it"):
        assert not training.scheduler()


@pytest.mark.parametrize("slot", ["weight", "momentum_buffer"])
def test_weights_that_are_no_numbers_cost_no_connection(slot: str) -> None:
    """What is NaN is dropped first; the number of connections stays exact."""
    training = Training(_momentum=0.9)
    training.run(last=4)
    training.backward(4)
    layer = training.scheduler.layers[0]
    held = layer.weight.detach() if slot == "weight" else training.optimizer.state[layer.weight][slot]
    held[layer.mask.nonzero(as_tuple=True)] = math.nan
    assert not training.scheduler()
    assert all(int(one.mask.sum()) == one.kept for one in training.scheduler.layers)
    assert held[~layer.mask].eq(0).all()


def test_a_gradient_that_is_no_number_reaches_no_entry_that_is_not_connected() -> None:
    """The optimizer spoils what is connected, as it would anywhere; the others stay and begin at zero."""
    training = Training(_momentum=0.9, alpha=1.0)
    training.optimizer.zero_grad()
    (training.model(rows(0)).square().mean() * math.nan).backward()
    assert training.scheduler()
    training.optimizer.step()
    for layer in training.scheduler.layers:
        assert not layer.weight[~layer.mask].any()
        layer.weight.data.nan_to_num_(nan=0.5)
    for name in ("weight", "bias"):
        for module in training.model.children():
            if hasattr(module, name):
                module.get_parameter(name).data.nan_to_num_(nan=0.5)
    old = masks(training.scheduler)
    for step in range(1, 5):
        training.backward(step)
        taken = training.scheduler()
    assert not taken
    for layer, was in zip(training.scheduler.layers, old, strict=True):
        grown = layer.mask & ~was
        assert grown.any()
        assert not training.optimizer.state[layer.weight]["momentum_buffer"][grown].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_connected_is_zero_whatever_its_gradient_is(bad: float) -> None:
    """Gradient, slots and weight, at once and later: what is no number stays nowhere unseen."""
    training = Training(_momentum=0.9, _weight_decay=0.1)
    layer = training.scheduler.layers[0]
    place = tuple(layer.others.nonzero()[0].tolist())

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[place] = bad
        return gradient

    handle = layer.weight.register_hook(spoil)
    training.backward(0)
    handle.remove()
    assert layer.weight.grad is not None
    assert layer.weight.grad[layer.others].eq(0).all()
    training.scheduler()
    training.optimizer.step()
    held = [layer.weight, *slots(training.optimizer, layer.weight)]
    assert len(held) == 2
    assert all(one[layer.others].eq(0).all() for one in held)
    training.scheduler.close()
    training.backward(1)
    training.optimizer.step()
    assert all(one.isfinite().all() for one in weights(training))
