"""Arguments of other types than a population expects are converted, or an error says what to pass."""

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import impls
from impls.perturbation.population import Population
from tests.perturbation.test_user_models import PLAIN_SCHEMES
from tests.scheme_cases import fill, normal

if TYPE_CHECKING:
    from collections.abc import Callable


def perturb_linear(scheme: Any = None, **options: Any) -> Population:
    """Make a population of four members of a Linear layer."""
    settings = {"members": 4, "sigma": 0.5, "warn": False, **options}
    return impls.perturb(fill(nn.Linear(3, 3)), scheme or impls.Perturbed(), **settings)


def gradients(population: Population) -> list[Tensor]:
    """Return the gradients of a population's parameters, which have one."""
    return [parameter.grad for parameter in population.model.parameters() if parameter.grad is not None]


NUMBERS = [0.1, 0.3, 1 / 3, 0.2]
"""Fitness that has other ranks in float16."""


def test_fitness_and_utilities_may_be_lists_and_arrays() -> None:
    """Lists and arrays have the results of a float64 tensor; what is no real number is a TypeError."""
    population = perturb_linear()
    noise = population.sample(0)

    def update(utilities: Any) -> Tensor:
        population.model.zero_grad()
        population.update(noise, utilities)
        return torch.cat([gradient.flatten() for gradient in gradients(population)])

    def best(fitness: Any) -> Tensor:
        return torch.cat([weight.flatten() for weight in population.best(noise, fitness).values()])

    calls: dict[str, Callable[[Any], Tensor]] = {
        "fitness of a shaping": impls.centered_ranks,
        "of z-scores": impls.z_scores,
        "of log ranks": impls.log_ranks,
        "of the best": lambda fitness: impls.top_k(fitness, 1),
        "per row": population.fitness,
        "of best": best,
        "utilities": update,
        "of a shard": lambda fitness: impls.shard(population).evaluate(0, lambda _: fitness),
    }
    for name, call in calls.items():
        expected = call(torch.tensor(NUMBERS, dtype=torch.float64))
        constant = np.array(NUMBERS)
        constant.flags.writeable = False
        for values in (NUMBERS, tuple(NUMBERS), np.array(NUMBERS), constant):
            assert torch.equal(call(values), expected), name
        for dtype in (torch.bool, torch.uint8, torch.uint16):
            assert torch.equal(call(torch.tensor([0, 1, 0, 0], dtype=dtype)), call([0, 1, 0, 0])), name
        for refused, words in (
            (None, "from NoneType"),
            ({"a": 1.0}, "from dict"),
            ("abcd", "from str"),
            ([1.0, "a", 2.0, 3.0], "from list"),
            (np.array(NUMBERS)[::-1], "from ndarray .*negative"),
            (torch.tensor(NUMBERS, dtype=torch.complex64), r"dense tensor, got torch\.complex64"),
            (torch.tensor(NUMBERS).to_sparse(), r"dense tensor, got torch\.float32 in torch\.sparse_coo"),
        ):
            with pytest.raises(TypeError, match=words):
                call(refused)
    for rows in (NUMBERS, np.array(NUMBERS)):
        with pytest.raises(TypeError, match=rf"rows\(\) repeats a tensor, got {type(rows).__name__}"):
            population.rows(rows)  # type: ignore[arg-type]  # no tensor


def test_what_is_no_noise_is_refused() -> None:
    """Each method that takes noise says what it must be, also for noise whose memory was overwritten."""
    population, x = perturb_linear(), normal(4, 3)
    calls: list[Callable[[Any], object]] = [
        lambda noise: population(x, noise=noise),
        lambda noise: population.call("forward", x, noise=noise),
        lambda noise: population.call_with_activations(x, noise=noise),
        lambda noise: population.prepare(noise, x),
        lambda noise: population.update(noise, torch.zeros(4)),
        lambda noise: population.member(noise, 0),
        lambda noise: population.perturbation(noise, 0),
        population.dense_noise,
        lambda noise: population.best(noise, torch.zeros(4)),
    ]
    part_calls: list[Callable[[Any], object]] = [
        lambda noise: population.rows(x, noise),
        lambda noise: population.fitness(torch.zeros(4), noise),
    ]
    for noises, takers in ((("noise", None), calls), (("noise",), part_calls)):
        for noise in noises:
            for call in takers:
                with pytest.raises(TypeError, match=r"noise must be what sample\(\) returned, got "):
                    call(noise)
    overwritten = population.sample(0)
    policy = population.prepare(overwritten, x)
    population.sample(1, out=overwritten)
    calls.append(lambda _: policy(x))
    for call in calls:
        with pytest.raises(ValueError, match="has overwritten this noise"):
            call(overwritten)


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES, ids=str)
def test_noise_of_another_dtype_is_explained(scheme: Any) -> None:
    """Where torch refuses noise of a model that was converted after sample(), the error says so."""
    population = perturb_linear(scheme)
    population.model.float()
    noise = population.sample(0)
    population.model.double()
    words = (
        r"drawn for a parameter in torch\.float32, which is torch\.float64 now: call sample\(\) again|"
        r"(weight\.data|the weight) of layer '' (was replaced|has changed) after sample"
    )
    x, messages = normal(4, 3).double(), []
    for call in (lambda: population(x, noise=noise), lambda: population.update(noise, torch.ones(4))):
        try:
            call()
        except ValueError as error:  # torch adds some noise in float32 to weights in float64
            messages.append(str(error))
    assert messages
    assert all(re.search(words, message) for message in messages)
    population(x, noise=population.sample(0))


def test_sigma_may_be_any_real_number() -> None:
    """Numbers of NumPy, without axes also arrays and tensors, become floats; all else is refused."""
    accepted = (np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2))
    for value in (*accepted, np.int64(1), 1):
        for population in (perturb_linear(sigma=value), perturb_linear(sigma={"*": value})):
            assert type(population.sigma) is float
            assert population.sigma == float(value)
        population = perturb_linear(sigma=0.25)
        population.sigma = value  # type: ignore[assignment]  # converted
        assert type(population.sigma) is float
        assert population.sigma == float(value)
    refused: tuple[Any, ...] = (
        True,
        np.True_,
        torch.tensor([True])[0],
        "0.5",
        None,
        0.5j,
        torch.ones(1),
        torch.tensor(math.nan),
    )
    for sigma in refused:
        with pytest.raises(ValueError, match="sigma must be a number above 0, got "):
            perturb_linear(sigma=sigma)
        with pytest.raises(ValueError, match="sigma must be a number above 0, got "):
            population.sigma = sigma


@pytest.mark.parametrize("scheme", PLAIN_SCHEMES, ids=str)
def test_gradients_of_inference_mode_can_be_changed_outside_of_it(scheme: Any) -> None:
    """A step in inference mode has the gradients of a step outside, to which a later step adds."""
    results = []
    for is_inference in (False, True):
        population = perturb_linear(scheme)
        for is_inside in (is_inference, False):
            with torch.inference_mode(is_inside):
                noise = population.sample(0)
                y, record = population.call_with_activations(normal(4, 3), noise=noise)
                population.update(noise, y.sum(1), record)
        assert not any(gradient.is_inference() for gradient in gradients(population))
        results.append(gradients(population))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_gradients_that_were_made_in_inference_mode_are_added_to() -> None:
    """A gradient that user code replaced in inference mode cannot be changed in place, but added to."""
    population = perturb_linear()
    noise, utilities = population.sample(0), [1.0, 2.0, 4.0, 8.0]
    population.update(noise, utilities)
    before = [gradient.clone() for gradient in gradients(population)]
    with torch.inference_mode():
        for parameter in population.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2
        population.update(noise, utilities)
    torch.testing.assert_close(gradients(population), [3 * gradient for gradient in before])
    assert not any(gradient.is_inference() for gradient in gradients(population))


def test_gradients_of_a_shard_in_inference_mode_can_be_changed_outside_of_it() -> None:
    """The gradient that a shard adds up in inference mode is an ordinary tensor."""
    shard = impls.shard(perturb_linear())
    with torch.inference_mode():
        shard.update(shard.evaluate(0, lambda noise: torch.ones(len(noise.members))))
    assert not any(gradient.is_inference() for gradient in gradients(shard.population))
