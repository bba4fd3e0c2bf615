"""What a scheme must provide, and the additive form that nearly all of them have.

A scheme is the mathematics of a perturbation: member m sees the weight W + sigma E_m, where the
entries of E_m have mean 0 and variance 1. Weights here are [g, o, i, *taps], see
:mod:`impls.perturbation.member_ops`.
Sigma, bias and its noise, antithetic halves and the layout of rows are not a scheme's business.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.perturbation.noise import Noise, NoiseStream, PhiloxStream
from impls.perturbation.operators import AbstractOperator

N = TypeVar("N", bound=Noise)


class TensorRef:
    """A tensor that noise refers to and does not hold, such as the weight that it is a multiple of."""

    def __init__(self, tensor: Tensor) -> None:
        """Refer to it, whatever it becomes."""
        self.tensor = tensor


class Flops(NamedTuple):
    """The least arithmetic of a scheme, a multiplication and an addition counted as two.

    A lower bound of what the scheme says it computes, from the noise that it holds, however it is
    implemented; drawing noise counts as none.

    Attributes:
        forward: of one row at one output position.
        update: of the sum over the whole population; for a scheme that learns from rows, of one
            row at one output position.

    """

    forward: int
    update: int


class AbstractScheme(ABC, Generic[N]):
    """How noise is drawn, applied to rows and summed into an update.

    Implementations are frozen dataclasses of their options, and name no operator.
    """

    @abstractmethod
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        """Draw the noise of the stream's members for a weight of this shape.

        Raises:
            ValueError: an option does not fit the weight's shape; the message has the numbers.

        """

    @abstractmethod
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        """Each row's product with its member's weight W + sigma E_m.

        Args:
            op: the operator whose two verbs to use.
            weight: W, [g, o, i, *taps].
            noise: of the members in x.
            x: activations [r, m, g, i, *space].
            sigma: a number, or a tensor [r, 1, ...] of one signed value for each repeat, where
                antithetic halves use the negated noise.

        Returns:
            A fresh tensor [r, m, g, o, *space'].

        """

    @abstractmethod
    def weighted_sum(self, noise: N, utilities: Tensor) -> Tensor:
        """Sum utilities[m] * directions[m], [g, o, i, *taps]; utilities have the noise's dtype."""

    @abstractmethod
    def dense_noise(self, noise: N) -> Tensor:
        """Every E_m, written out: [m, g, o, i, *taps]. The slow truth that the rest is held to."""

    def supports(self, module: nn.Module) -> str:  # noqa: ARG002  for those who override it
        """Return why the scheme cannot serve this layer where its parameters are; nothing where it can."""
        return ""

    @property
    def stream(self) -> str:
        """Where its noise comes from, unless something else is asked for: the name of a stream."""
        return "block"

    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:  # noqa: ARG002  # for those who override it
        """Turn drawn noise into the form that ``forward`` reads; most schemes read it as drawn."""
        return noise

    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        """Return what a member with noise sigma E_m = ``change`` sees, as a weight of the plain layer."""
        return weight + change

    def update_directions(self, noise: N) -> Tensor:
        """What utilities are summed with, [m, g, o, i, *taps]: E_m itself, unless :attr:`contrasts`."""
        return self.dense_noise(noise)

    @property
    def update_directions_differ(self) -> bool:
        """Whether the update sums what is no multiple of E_m, but has the same gradient as its mean."""
        return False

    @property
    def shard_multiple(self) -> int:
        """Populations may be split at its multiples, if at those of their stream too."""
        return 1

    @property
    def supports_antithetic(self) -> bool:
        """Whether W - sigma E_m is a weight that a member can see: what antithetic sampling needs."""
        return True

    def kappa(self, weight: torch.Size, members: int) -> float | None:  # noqa: ARG002  for those who override it
        """Return the closed form of kappa in the quality law; None where nobody has derived one.

        For a locally linear fitness with centred utilities, a generic gradient G and d weights, the
        estimate g = sum_m c_m E_m has cos^2(g, G) = 1 / (1 + kappa + d / n): n members whose E_m share
        something are worth n / (1 + kappa n / d) independent ones. The form is for a weight
        [g, o, i, *taps], with entries like Gaussian ones where E_m depends on them.
        """
        return None

    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        """Return kappa for the weight at hand: :meth:`kappa`, unless noise scales with the weight."""
        return self.kappa(weight.shape, members)

    def noise_std(self, weight: Tensor, sigma: float) -> Tensor | float:  # noqa: ARG002  for those who override it
        """Return the standard deviation of E_m's entries: 1, but for noise that scales with the weight."""
        return 1.0

    @property
    def learns_from_rows(self) -> bool:
        """Whether the update needs the rows that layers saw: no sum of utilities times noise."""
        return False

    def density(self, weight: torch.Size) -> float:  # noqa: ARG002  for those who override it
        """Return how much of the plain product a forward computes, on average."""
        return 1.0

    def flops(self, weight: torch.Size, members: int) -> Flops | None:  # noqa: ARG002  for those who override it
        """Declare the least arithmetic for a weight [g, o, i, *taps]; None says nothing about it."""
        return None

    def read_bytes(self, weight: Tensor, noise: N) -> int:
        """Bytes of W and of the noise that a forward cannot do without: all of them, for most."""
        return weight.nbytes + noise.nbytes


def concentration(squares: Tensor) -> float | None:
    """Return sum l^2 / (sum l)^2 of the squared lengths l that have a random factor each, in any shape.

    It is 1 / n for n alike and 1 where one is all; None where there is nothing.
    """
    lengths = squares.double()
    total = float(lengths.sum())
    return float(lengths.square().sum()) / total**2 if total else None


AnyScheme = AbstractScheme[Any]
"""A scheme whose kind of noise does not matter."""


class AbstractRowScheme(AbstractScheme[N]):
    """A scheme that learns from the rows its layers saw: its update is no sum of utilities times noise.

    It is node perturbation. What noise adds to a row's output, u = (W + sigma E_m) x - W x, moves the
    utility; u times the utility says where the output should go, and is pulled back to the weight as
    backpropagation would: the sum of c / v * d<u, W x>/dW over the rows, with v = Var(sigma E) / W^2. Of
    antithetic halves c is half the difference of the two utilities, with the sign of the row's noise.
    """

    @property
    @override
    def learns_from_rows(self) -> bool:
        return True

    @abstractmethod
    def node_gradient(
        self, op: AbstractOperator, weight: Tensor, noise: N, utilities: Tensor, x: Tensor
    ) -> Tensor:
        """Sum the rows' estimates of the gradient of utility with respect to W, [g, o, i, *taps].

        Args:
            op: the operator that the layer was called with.
            weight: W, as the forward used it.
            noise: of the members in x.
            utilities: [r, m], one for each row, with its sign turned where the row saw the negated noise.
            x: activations [r, m, g, i, *space] that the layer was called with.

        """


class AbstractAdditiveScheme(AbstractScheme[N]):
    """A scheme that adds a correction to the unperturbed output: x W^T + sigma * x E_m^T."""

    @abstractmethod
    def correction(self, op: AbstractOperator, noise: N, x: Tensor) -> Tensor:
        """Each row's product with its member's E_m: [r, m, g, i, *s] -> a fresh [r, m, g, o, *s']."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        """Add sigma times the correction and the product with the shared weight."""
        return op.add_shared_to(self.correction(op, noise, x), sigma, x, weight)


def add(y: Tensor, correction: Tensor, sigma: float | Tensor) -> Tensor:
    """Add sigma * correction to y in place, in one pass."""
    if isinstance(sigma, Tensor):
        return y.addcmul_(correction, sigma)
    return y.add_(correction, alpha=sigma)


class AbstractWrapper(AbstractScheme[N]):
    """Noise, slow truth, quality and least work are those of :attr:`plain`, the scheme that it wraps.

    What is left open is what it is for: the forward, the update, and which layers it serves.
    """

    @property
    @abstractmethod
    def plain(self) -> AbstractScheme[N]:
        """The scheme that is wrapped."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        if self.stream == "philox" and not isinstance(stream, PhiloxStream):
            message = (
                f"{self} draws its noise inside of a kernel, by the counters of the stream philox: another "
                "stream has other numbers. Leave the stream out, or ask for philox"
            )
            raise ValueError(message)
        return self.plain.sample(weight, stream)

    @override
    def dense_noise(self, noise: N) -> Tensor:
        return self.plain.dense_noise(noise)

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return self.plain.prepare(noise, weight, sigma)

    @override
    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        return self.plain.effective_weight(weight, change)

    @override
    def update_directions(self, noise: N) -> Tensor:
        return self.plain.update_directions(noise)

    @property
    @override
    def update_directions_differ(self) -> bool:
        return self.plain.update_directions_differ

    @property
    @override
    def learns_from_rows(self) -> bool:
        return self.plain.learns_from_rows

    @property
    @override
    def shard_multiple(self) -> int:
        return self.plain.shard_multiple

    @property
    @override
    def supports_antithetic(self) -> bool:
        return self.plain.supports_antithetic

    @override
    def kappa(self, weight: torch.Size, members: int) -> float | None:
        return self.plain.kappa(weight, members)

    @override
    def kappa_of(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa_of(weight, members)

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor | float:
        return self.plain.noise_std(weight, sigma)

    @override
    def density(self, weight: torch.Size) -> float:
        return self.plain.density(weight)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops | None:
        return self.plain.flops(weight, members)

    @override
    def read_bytes(self, weight: Tensor, noise: N) -> int:
        return self.plain.read_bytes(weight, noise)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no int of at least so much.

    Raises:
        ValueError: with the option's name and what it was.

    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        message = f"{name} must be an int of at least {least}, got {value!r}"
        raise ValueError(message)


def check_choice(name: str, value: object, *choices: str) -> None:
    """Refuse what is none of the choices.

    Raises:
        ValueError: with the option's name and what it was.

    """
    if value not in choices:
        *most, last = map(repr, choices)
        message = f"{name} must be {', '.join(most)} or {last}, got {value!r}"
        raise ValueError(message)


def check_probability(name: str, value: object) -> None:
    """Refuse what is no number between 0 and 1.

    Raises:
        ValueError: with the option's name and what it was.

    """
    if not isinstance(value, int | float) or not 0 < value < 1:
        message = f"{name} must be a number between 0 and 1, got {value!r}"
        raise ValueError(message)


def check_share(name: str, value: object) -> None:
    """Refuse what is neither a share of channels, above 0 and at most 1, nor a number of them, an int.

    Raises:
        ValueError: with the option's name and what it was.

    """
    is_share = isinstance(value, float) and 0 < value <= 1
    if isinstance(value, bool) or not (is_share or (isinstance(value, int) and value >= 1)):
        message = f"{name} must be in (0, 1], or an int of at least 1 for a number of channels, got {value!r}"
        raise ValueError(message)
