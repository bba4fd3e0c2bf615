"""RigL with mixed precision: scaled gradients, and those that overflow."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rigl_cases import STEPS, Training, equal, masks, rows, weights


def scaled(**settings: Any) -> torch.amp.GradScaler:
    """Make a GradScaler for the CPU."""
    return torch.amp.GradScaler("cpu", **settings)


def dense(training: Training, step: int) -> list[Tensor]:
    """Return the dense gradients of a step for each sparse weight, without touching them."""
    twin = copy.deepcopy(training.model)
    wanted = [twin.get_parameter(layer.name) for layer in training.scheduler.layers]
    return list(torch.autograd.grad(twin(rows(step)).square().mean(), wanted))


def test_mixed_precision_works() -> None:
    """With autocast and a GradScaler, which takes no step where a scaled gradient overflows."""
    training, scaler = Training(), scaled(init_scale=2.0**10)
    old = masks(training.scheduler)
    for step in range(STEPS):
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.model(rows(step)).float().square().mean()
        scaler.scale(loss * (torch.inf if step == 2 else 1)).backward()
        if training.scheduler():
            scaler.step(training.optimizer)
            scaler.update()
    assert not equal(masks(training.scheduler), old)
    assert all(one.isfinite().all() for one in weights(training))
    assert all(not layer.weight[~layer.mask].any() for layer in training.scheduler.layers)


def test_scales_that_change_between_passes_do_not_weigh_their_gradients() -> None:
    """With the scaler told, what grows and what is learnt is bitwise that of a training without one."""
    plain = Training(grad_accumulation_n=4, alpha=1.0)
    scaler = scaled(init_scale=2.0, growth_interval=1, growth_factor=16.0)
    training = Training(grad_accumulation_n=4, alpha=1.0, scaler=scaler)
    for step in range(9):
        plain.step(step)
        training.optimizer.zero_grad()
        scaler.scale(training.model(rows(step)).square().mean()).backward()
        if training.scheduler():
            scaler.step(training.optimizer)
            scaler.update()
    for one, other in zip(training.scheduler.layers, plain.scheduler.layers, strict=True):
        assert one.gathered is not None
        assert other.gathered is not None
        assert torch.equal(one.gathered, other.gathered)
    assert equal(masks(training.scheduler), masks(plain.scheduler))
    assert equal(weights(training), weights(plain))


@pytest.mark.parametrize("unscales", [True, False])
def test_clipping_with_a_scaler_goes_on_behind_an_update(unscales: bool) -> None:
    """The scaler is updated in every step whose gradients were unscaled, and else in those that were taken.

    Training is bitwise that without a scaler; where connections move, an overflow lowers the scale, too.
    """
    plain, training = Training(), Training()
    scaler = scaled(init_scale=2.0**10, growth_interval=3)
    for step in range(STEPS):
        for one in (plain, training):
            one.optimizer.zero_grad()
        loss = plain.model(rows(step)).square().mean()
        loss.backward()
        scaler.scale(training.model(rows(step)).square().mean()).backward()
        for one in (plain, training) if unscales else ():
            if one is training:
                scaler.unscale_(training.optimizer)
            torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.05)
        if plain.scheduler():
            plain.optimizer.step()
        if taken := training.scheduler():
            scaler.step(training.optimizer)
        if unscales or taken:
            scaler.update()
    assert training.scheduler.updates == 4
    assert equal(masks(training.scheduler), masks(plain.scheduler))
    assert equal(weights(training), weights(plain))


def test_an_overflow_lowers_the_scale_where_connections_would_have_moved() -> None:
    """The next step finds a scaler that has been updated."""
    training, scaler = Training(delta=1), scaled(init_scale=2.0**10)
    scaler.scale(training.model(rows(0)).square().mean() * torch.inf).backward()
    scaler.unscale_(training.optimizer)
    with pytest.warns(RuntimeWarning, match="not finite"):
        assert not training.scheduler()
    scaler.update()
    assert scaler.get_scale() == 2.0**9


def test_a_scaler_that_is_none_is_refused() -> None:
    """Here a number."""
    with pytest.raises(ValueError, match=re.escape("scaler 65536.0: expected a torch.amp.GradScaler")):
        Training(scaler=65536.0)


@pytest.mark.parametrize("overflows", [1, 3, 4])
def test_a_pass_that_overflows_is_left_out_of_the_mean(overflows: int) -> None:
    """The others say what grows, without a warning, whichever it is; it is stored so, too."""
    training = Training(grad_accumulation_n=4)
    total = [torch.zeros_like(layer.weight) for layer in training.scheduler.layers]
    for step in range(5):
        training.optimizer.zero_grad()
        if step == overflows:
            (training.model(rows(step)).square().mean() * torch.inf).backward()
        else:
            if step:
                total = [one + other for one, other in zip(total, dense(training, step), strict=True)]
            training.backward(step)
        if step < 4:
            training.scheduler()
    for layer, expected in zip(training.scheduler.layers, total, strict=True):
        assert int(layer.passes) == 3
        torch.testing.assert_close(layer.gathered, expected)
    training.scheduler.load_state_dict(training.scheduler.state_dict())
    old = masks(training.scheduler)
    assert not training.scheduler()
    assert not any(map(torch.equal, masks(training.scheduler), old))


def test_where_every_pass_overflows_nothing_moves() -> None:
    """With a warning, also where it was stored between them."""
    training = Training(grad_accumulation_n=2)
    training.run(last=3)
    old = masks(training.scheduler)
    for step in (3, 4):
        training.optimizer.zero_grad()
        (training.model(rows(step)).square().mean() * torch.nan).backward()
        training.scheduler.load_state_dict(training.scheduler.state_dict())
        if step == 3:
            training.scheduler()
    with pytest.warns(
        RuntimeWarning, match=r"nothing moved in 2\.weight \(its gradient is not finite\), 5\."
    ):
        assert not training.scheduler()
    assert equal(masks(training.scheduler), old)
