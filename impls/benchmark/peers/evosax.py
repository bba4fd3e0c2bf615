"""evosax: Open_ES with a generation in one ``jax.jit``, and several generations in one ``jax.lax.scan``."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.benchmark.peers.networks import CNN, HEADS, MLP, OPERATORS, TRANSFORMER
from impls.benchmark.peers.workload import (
    AbstractLibrary,
    AbstractOpenSearch,
    AbstractSearch,
    Task,
)
from impls.benchmark.training.workload import check_supported

EPSILON = torch.nn.LayerNorm(1).eps
SCANNED = 5
"""The generations of a scan."""
SCANNED_MEMBERS = 256
"""The most evaluations of a scan: above, the start of a call is less than a hundredth of its time."""


def set_up_process() -> None:
    """Give JAX as many threads as torch has, and GPU memory as needed; both are read when JAX starts."""
    os.environ.setdefault("NPROC", str(torch.get_num_threads()))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _mlp(jax: Any, parameters: Any, x: Any) -> Any:  # noqa: ANN401  arrays of JAX
    """Return the logits of the MLP with parameters in torch's order; columns are faster than rows."""
    weight, bias, last_weight, last_bias = parameters
    hidden = jax.nn.relu(weight @ x.T + bias[:, None])
    return (last_weight @ hidden + last_bias[:, None]).T


def _cnn(jax: Any, parameters: Any, x: Any) -> Any:  # noqa: ANN401  the same
    """Return the logits of the CNN."""
    *convolutions, last_weight, last_bias = parameters
    for stride, kernel, bias in zip((1, 2), convolutions[::2], convolutions[1::2], strict=True):
        y = jax.lax.conv_general_dilated(x, kernel, (stride, stride), ((1, 1), (1, 1)))
        x = jax.nn.relu(y + bias[:, None, None])
    return x.reshape(len(x), -1) @ last_weight.T + last_bias


def _transformer(jax: Any, parameters: Any, x: Any) -> Any:  # noqa: ANN401  the same
    """Return the logits of the transformer block."""
    pairs = iter(zip(parameters[::2], parameters[1::2], strict=True))

    def linear(x: Any) -> Any:  # noqa: ANN401  the same
        weight, bias = next(pairs)
        return x @ weight.T + bias

    def normalize(x: Any) -> Any:  # noqa: ANN401  the same
        scale, shift = next(pairs)
        return jax.nn.standardize(x, epsilon=EPSILON) * scale + shift

    x = linear(x)
    heads = linear(normalize(x)).reshape(*x.shape[:2], 3, HEADS, -1)
    attended = jax.nn.dot_product_attention(*(heads[:, :, index] for index in range(3)))
    x += linear(attended.reshape(x.shape))
    x += linear(jax.nn.relu(linear(normalize(x))))
    return linear(x.mean(1))


NETWORKS = {MLP: _mlp, CNN: _cnn, TRANSFORMER: _transformer}


class EvosaxSearch(AbstractOpenSearch):
    """The state of Open_ES, and its compiled functions; a call waits until its results are ready."""

    def __init__(self, scheme: "Evosax", task: Task) -> None:
        set_up_process()
        jax, jnp, optax, algorithms = scheme.modules("jax", "jax.numpy", "optax", "evosax.algorithms")
        self.generations = scheme.generations
        self._jax, self._jnp, self._y = jax, jnp, task.y
        solution = [jnp.asarray(parameter.cpu()) for parameter in task.model.parameters()]
        logits_of = NETWORKS[task.operator]
        search = algorithms.Open_ES(
            population_size=task.population,
            solution=solution,
            optimizer=optax.sgd(task.learning_rate),
            std_schedule=optax.constant_schedule(task.sigma),
        )
        params = search.default_params
        self._key, key = jax.random.split(jax.random.key(task.seed))
        self._state = search.init(key, solution, params)

        def loss(parameters: Any, x: Any, y: Any) -> Any:  # noqa: ANN401  arrays of JAX
            logits = logits_of(jax, parameters, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        def generation(carry: Any, x: Any, y: Any) -> Any:  # noqa: ANN401  the same
            key, state = carry
            key, ask_key, tell_key = jax.random.split(key, 3)
            members, state = search.ask(ask_key, state, params)
            losses = jax.vmap(loss, in_axes=(0, None, None))(members, x, y)
            state, _ = search.tell(tell_key, members, losses, state, params)
            return (key, state), losses

        def scan(carry: Any, x: Any, y: Any) -> Any:  # noqa: ANN401  the same
            return jax.lax.scan(lambda carry, _: generation(carry, x, y), carry, length=self.generations)

        self._take_steps: Any = jax.jit(generation if self.generations == 1 else scan)
        self._ask: Any = lambda key, state: search.ask(key, state, params)[0]
        self._losses: Any = jax.jit(jax.vmap(loss, in_axes=(0, None, None)))
        self._ravel: Any = lambda tree: jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])

    def _array(self, tensor: Tensor) -> Any:  # noqa: ANN401  the same
        return self._jnp.from_dlpack(tensor)

    def _tensor(self, array: Any) -> Tensor:  # noqa: ANN401  the same
        """Return a copy, which torch counts as memory of the call."""
        return torch.utils.dlpack.from_dlpack(self._jax.block_until_ready(array)).clone()

    @override
    def draw(self) -> Any:
        self._key, key = self._jax.random.split(self._key)
        return self._jax.block_until_ready(self._ask(key, self._state))

    @override
    def evaluate(self, drawn: Any, x: Tensor) -> Tensor:
        return self._tensor(self._losses(drawn, self._array(x), self._array(self._y)))

    @override
    def member(self, drawn: Any, index: int) -> Tensor:
        return self._tensor(self._ravel(self._jax.tree.map(lambda leaf: leaf[index], drawn)))

    @override
    def step(self, x: Tensor) -> Tensor:
        carry, losses = self._take_steps((self._key, self._state), self._array(x), self._array(self._y))
        self._key, self._state = self._jax.block_until_ready(carry)
        return self._tensor(losses)

    @override
    def center(self) -> Tensor:
        return self._tensor(self._state.mean)


@variant(
    operators=OPERATORS,
    version="0.3.2",
    generations=(1, SCANNED),
    source="https://github.com/RobertTLange/evosax#basic-evosax-api-usage-",
)
@dataclass(frozen=True)
class Evosax(AbstractLibrary):
    """Open_ES with antithetic sampling, centered ranks and optax's SGD.

    A call compiles and runs one generation, or several on the same batch with ``jax.lax.scan``.
    """

    NAME: ClassVar[str] = "evosax"
    DTYPES: ClassVar[tuple[str, ...]] = ("float32",)  # JAX needs a global setting for float64
    generations: int = 1

    @override
    def search(self, task: Task) -> AbstractSearch:
        check_supported(
            self.generations == 1 or task.population <= SCANNED_MEMBERS,
            f"a scan saves the start of a call, which matters up to {SCANNED_MEMBERS} evaluations",
        )
        return EvosaxSearch(self, task)
