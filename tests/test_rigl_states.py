"""The state of a RigLScheduler: it is used as a whole, or refused in words and nothing is changed."""

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from impls.training.connections import slots
from impls.training.rigl import RigLScheduler
from tests.rigl_cases import Training, equal, masks, weights


def test_what_a_state_does_not_connect_is_zero_with_its_slots() -> None:
    """Of an optimizer that has trained dense, too; what is connected keeps its weights and slots."""
    saved = Training(drawn=3).scheduler.state_dict()
    for makes in (True, False):
        training = Training(torch.optim.Adam)
        training.run(last=3)
        if makes:
            training.scheduler.close()
        for layer in training.scheduler.layers:
            for one in (layer.weight.data, *slots(training.optimizer, layer.weight)):
                one.fill_(0.5)
        if makes:
            scheduler = RigLScheduler(training.model, training.optimizer, state_dict=saved)
        else:
            scheduler = training.scheduler
            scheduler.load_state_dict(saved)
        for layer in scheduler.layers:
            mask = saved["masks"][layer.name]
            assert torch.equal(layer.mask, mask)
            kept = slots(training.optimizer, layer.weight)
            assert len(kept) == 2
            assert all(torch.equal(one, 0.5 * mask) for one in (layer.weight, *kept))


def test_what_a_first_mask_does_not_connect_is_zero_with_its_slots() -> None:
    """Where an optimizer has trained the dense network before."""
    training = Training(torch.optim.Adam)
    training.scheduler.close()
    training.backward(0)
    training.optimizer.step()
    asked: dict[str, Any] = {"dense_allocation": 0.2, "T_end": 25, "delta": 5}
    for layer in RigLScheduler(training.model, training.optimizer, **asked).layers:
        kept = slots(training.optimizer, layer.weight)
        assert len(kept) == 2
        assert all(one[layer.mask].any() and not one[~layer.mask].any() for one in kept)


def damaged(name: str) -> Callable[[dict[str, Any]], object]:
    """Return what damages a state as the name says."""
    full = torch.ones(24, 20, dtype=torch.bool)
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "no mask": lambda state: state["masks"].pop("5.weight"),
        "other connections": lambda state: state["masks"]["5.weight"].logical_not_(),
        "dense": lambda state: state["masks"].update({"2.weight": full}),
        "numbers": lambda state: state["masks"].update({"2.weight": full.float()}),
        "words": lambda state: state["masks"].update({"2.weight": "full"}),
        "shape": lambda state: state["masks"].update({"2.weight": full.T}),
        "strange mask": lambda state: state["masks"].update({"9.weight": full}),
        "list": lambda state: state.update(masks=[full]),
        "step": lambda state: state.update(step=-1),
        "updates": lambda state: state.update(updates="2"),
        "setting": lambda state: state["schedule"].update(delta=0),
        "settings": lambda state: state["schedule"].pop("delta"),
        "gradient": lambda state: state["gathered"].update({"2.weight": (full[:2].float(), 1, False)}),
        "passes": lambda state: state["gathered"].update({"2.weight": (full.float(), -1, False)}),
        "pair": lambda state: state["gathered"].update({"2.weight": (full.float(), 1)}),
        "strange gradient": lambda state: state["gathered"].update({"3.weight": (full.float(), 1, False)}),
        "generator": lambda state: state.update(generator=torch.zeros(3, dtype=torch.uint8)),
        "no generator": lambda state: state.update(generator=None),
        "alpha": lambda state: state["schedule"].update(alpha=10**400),
        "far": lambda state: state.update(step=10**400),
        "mask of 1": lambda state: state["masks"].update({1: full}),
        "sparse mask": lambda state: state["masks"].update({"2.weight": full.to_sparse()}),
        "gradient of 1": lambda state: state["gathered"].update({1: 2}),
        "sparse": lambda state: state["gathered"].update({"2.weight": (full.float().to_sparse(), 1, False)}),
        "complex": lambda state: state["gathered"].update({"2.weight": (full.to(torch.cfloat), 1, False)}),
        "many": lambda state: state["gathered"].update({"2.weight": (full.float(), 10**400, False)}),
    }
    return changes[name]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no mask", "the state is damaged: it has no mask of 5.weight"),
        ("other connections", "the mask of 5.weight has"),
        ("dense", "the mask of 2.weight has 480 connections, and its settings ask for"),
        ("numbers", "the mask of 2.weight is no tensor of bools"),
        ("words", "the mask of 2.weight is no tensor of bools"),
        ("shape", "the mask of 2.weight is (20, 24), and the weight (24, 20)"),
        ("strange mask", "it has masks of 9.weight, which its settings leave dense"),
        ("list", "masks is of type list, and no dict"),
        ("step", "step -1 is no number of steps"),
        ("updates", "updates '2' is no number of steps"),
        ("setting", "delta 0: expected a number of steps"),
        ("settings", "its schedule lacks, or has besides, delta"),
        ("gradient", "the gathered gradients of 2.weight are no tensor of (24, 20)"),
        ("passes", "the gathered gradients of 2.weight are of -1 passes"),
        ("pair", "the gathered gradients of 2.weight are no tensor"),
        ("strange gradient", "gathered gradients of 3.weight, without a mask"),
        ("generator", "that of its generator cannot be used"),
        ("no generator", "the state of its generator is no tensor"),
        ("alpha", "0: expected a share of the connections"),
        ("far", "0 is no number of steps"),
        ("mask of 1", "it has masks of 1, which its settings leave dense"),
        ("sparse mask", "the mask of 2.weight is no tensor of bools"),
        ("gradient of 1", "gathered gradients of 1, without a mask"),
        ("sparse", "the gathered gradients of 2.weight are no tensor of (24, 20)"),
        ("complex", "the gathered gradients of 2.weight are no tensor of (24, 20)"),
        ("many", "the gathered gradients of 2.weight are of 1000"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage: str, message: str) -> None:
    """Neither weights nor slots, masks or settings, in a scheduler that there is or that would be made."""
    state = Training(drawn=3, delta=4, grad_accumulation_n=2).scheduler.state_dict()
    damaged(damage)(state)
    training = Training(_momentum=0.9, grad_accumulation_n=2)
    training.run(last=9)
    before = copy.deepcopy((training.scheduler.state_dict(), training.optimizer.state_dict()["state"]))
    held, old = weights(training), masks(training.scheduler)
    with pytest.raises(ValueError, match=re.escape(message)):
        training.scheduler.load_state_dict(state)
    now = training.scheduler.state_dict(), training.optimizer.state_dict()["state"]
    assert str(now) == str(before)
    assert equal(weights(training), held)
    assert equal(masks(training.scheduler), old)
    training.scheduler.close()
    with pytest.raises(ValueError, match=re.escape(message)):
        RigLScheduler(training.model, training.optimizer, state_dict=state)
    assert equal(weights(training), held)
    RigLScheduler(training.model, training.optimizer, state_dict=before[0])


def test_what_is_no_state_is_refused() -> None:
    """The message says of which type it is."""
    with pytest.raises(ValueError, match="which is a dict, but of type list"):
        Training().scheduler.load_state_dict([])  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize("makes", [True, False])
def test_a_state_that_was_read_is_not_written_to(makes: bool) -> None:
    """Training goes on from copies, so that it can be read again."""
    first = Training(grad_accumulation_n=4)
    first.run(last=3)
    state = first.scheduler.state_dict()
    assert state["gathered"]
    before = copy.deepcopy(state)
    training = Training(grad_accumulation_n=4)
    if makes:
        training.scheduler.close()
        training.scheduler = RigLScheduler(training.model, training.optimizer, state_dict=state)
    else:
        training.scheduler.load_state_dict(state)
    training.run(first=3, last=11)
    assert not equal(masks(training.scheduler), list(before["masks"].values()))
    assert equal(list(state["masks"].values()), list(before["masks"].values()))
    for name, (gathered, *rest) in state["gathered"].items():
        assert torch.equal(gathered, before["gathered"][name][0])
        assert rest == [*before["gathered"][name][1:]]


def test_settings_of_numpy_are_stored_in_plain_types(tmp_path: Any) -> None:
    """So that torch reads them without trusting the file."""
    settings: dict[str, Any] = {
        "dense_allocation": np.float64(0.25),
        "T_end": np.int64(25),
        "delta": np.int32(5),
        "alpha": np.float32(0.25),
        "grad_accumulation_n": np.int64(2),
        "begin": np.int64(0),
        "sparsity_distribution": np.str_("erk"),
        "growth": np.str_("gradient"),
        "drawn": np.int64(3),
    }
    training = Training(**settings)
    torch.save(training.scheduler.state_dict(), tmp_path / "it")
    state = torch.load(tmp_path / "it", weights_only=True)
    assert [*map(type, state["schedule"].values())] == [float, int, int, float, int, str, bool, int, str]
    plain = {
        name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()
    }
    assert equal(masks(Training(**plain).scheduler), masks(training.scheduler))
