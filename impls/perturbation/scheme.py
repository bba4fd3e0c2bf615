"""The interface of a scheme: how a perturbation is drawn, applied and summed into an update.

Member m of a population sees the weight W + sigma E_m. A scheme defines E_m; its entries have mean 0 and
variance 1. Weights are [g, o, i, *taps]; :mod:`impls.perturbation.member_ops` defines the axes. For all
schemes :mod:`impls.perturbation.layer` handles the bias and its noise, antithetic halves and rows.

A scheme has to define ``sample``, ``forward`` (or ``correction``, see :class:`AbstractAdditiveScheme`),
``weighted_sum`` and ``dense_noise``. All other methods have a default.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.perturbation.member_ops import sum_pieces
from impls.perturbation.noise import Noise, NoiseStream, piece_bytes, pieces
from impls.perturbation.operators import AbstractOperator, TransposedLinear

N = TypeVar("N", bound=Noise)


class TensorRef:
    """A reference to a tensor that is not part of the noise, such as the weight that scales it.

    It does not count in :attr:`Noise.nbytes`, and :meth:`Noise.narrow` does not change it.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Refer to a tensor; later changes in place are seen."""
        self.tensor = tensor


class Flops(NamedTuple):
    """A lower bound of a scheme's arithmetic; a multiplication and an addition count as two.

    Drawing noise counts as 0.

    Attributes:
        forward: flops for one row at one output position.
        update: flops for the whole population; for a scheme that learns from rows, for one row at one output
            position.
    """

    forward: int
    update: int


class AbstractScheme(ABC, Generic[N]):
    """How noise is drawn, applied to rows and summed into an update.

    Implementations are frozen dataclasses of their options, and work with any operator.
    """

    # Required.

    @abstractmethod
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        """Draw the noise of the stream's members for a weight [g, o, i, *taps].

        Raises:
            UnsupportedError: an option does not fit the weight's shape.
        """

    @abstractmethod
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        """Apply each member's weight W + sigma E_m to its rows.

        Args:
            op: the layer's operator.
            weight: W, [g, o, i, *taps].
            noise: noise of the m members.
            x: activations [r, m, g, i, *space].
            sigma: a number; with antithetic sampling a tensor [r, 1, ...], negative for the repeats that see
                the negated noise.

        Returns:
            A new tensor [r, m, g, o, *space'].
        """

    @abstractmethod
    def weighted_sum(self, noise: N, utilities: Tensor) -> Tensor:
        """Return the sum over members m of utilities[m] * E_m, in the shape of the weight, [g, o, i, *taps].

        Args:
            noise: noise of the members.
            utilities: [m], in the noise's dtype.
        """

    @abstractmethod
    def dense_noise(self, noise: N) -> Tensor:
        """Return every E_m as a dense tensor, [m, g, o, i, *taps].

        This is the reference implementation: ``forward`` and ``weighted_sum`` are tested against it.
        """

    # Optional: supported layers and streams.

    draws_binary_weights = False
    """Whether members have binary weights. Such a scheme needs layers whose weights are logits."""

    def why_unsupported(self, module: nn.Module) -> str:  # noqa: ARG002  for subclasses
        """Return why the scheme does not support a layer on its device, or ``""`` if it does."""
        return ""

    @property
    def stream(self) -> str:
        """Name of the default stream: ``block`` or ``philox``."""
        return "block"

    @property
    def shard_multiple(self) -> int:
        """A population may be split at multiples of this number and of the stream's."""
        return 1

    @property
    def supports_antithetic(self) -> bool:
        """Whether members may see W - sigma E_m, as antithetic sampling needs."""
        return True

    @property
    def learns_from_rows(self) -> bool:
        """Whether the update needs the layers' inputs, see :class:`AbstractRowScheme`."""
        return False

    @property
    def stores_weight(self) -> bool:
        """Whether the noise has numbers computed from W, so that it is drawn again after W changes."""
        return False

    def is_up_to_date(self, noise: N, weight: Tensor) -> bool:  # noqa: ARG002  for subclasses
        """Return whether the numbers of the weight that the noise stores are still those of the weight."""
        return True

    def lookup(self, noise: N, tokens: Tensor) -> Tensor:
        """Return the rows of E_m that an Embedding reads: tokens [m, p] -> [m, p, i].

        By default E_m is written out, for some members at a time.

        Args:
            noise: noise of the m members for a table [1, o, i] of o tokens.
            tokens: the indices of rows.
        """
        rows = []
        member_bytes = self.dense_noise(noise.narrow(0, 1)).nbytes
        for start, stop in pieces(len(tokens), member_bytes, piece_bytes(tokens.device)):
            table = self.dense_noise(noise.narrow(start, stop))[:, 0]
            index = tokens[start:stop].unsqueeze(2).expand(-1, -1, table.shape[2])
            rows.append(table.gather(1, index))
        return torch.cat(rows)

    def forward_transposed(
        self, op: TransposedLinear, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        """Apply the transpose of each member's weight to its rows: [r, m, 1, o] -> [r, m, 1, i].

        By default E_m is written out, for some members at a time. The arguments are as for :meth:`forward`.
        """
        y = op.apply_shared(x, weight)
        for start, stop in pieces(x.shape[1], weight.nbytes, piece_bytes(x.device)):
            dense = self.dense_noise(noise.narrow(start, stop))
            add_scaled(y[:, start:stop], op.apply_per_member(x[:, start:stop], dense), sigma)
        return y

    # Optional: another form of the noise, of the weight or of the update.

    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:  # noqa: ARG002  for subclasses
        """Convert the result of ``sample`` to the form that ``forward`` reads; by default they are equal."""
        return noise

    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        """Return the weight of the plain layer for a member with sigma E_m = ``change``."""
        return weight + change

    def update_directions(self, noise: N) -> Tensor:
        """Return the tensors D_m that the update multiplies by utilities, [m, g, o, i, *taps].

        They are E_m, unless :attr:`update_directions_differ`.
        """
        return self.dense_noise(noise)

    @property
    def update_directions_differ(self) -> bool:
        """Whether the update sums other tensors D_m than E_m; its mean is the gradient all the same."""
        return False

    # Optional: quality.

    @property
    def is_biased(self) -> bool:
        """Whether, by design, the mean of the update over many steps is not a multiple of the gradient.

        A scheme that has such a bias and does not declare it fails its check. :mod:`impls.quality.bias`
        defines the bias.
        """
        return False

    def kappa(self, weight: Tensor, members: int) -> float | None:  # noqa: ARG002  for subclasses
        """Return the closed form of kappa, or None if it is unknown.

        For a linear fitness with gradient G of d weights and centered utilities c_m, the estimate
        g = sum_m c_m E_m has the mean cos^2(g, G) = 1 / (1 + kappa + d / n): n members are worth
        n_eff = n / (1 + kappa n / d) members with independent noise. :mod:`impls.quality.kappa` derives this.

        Args:
            weight: W, [g, o, i, *taps]. Only noise that scales with the weight reads its values.
            members: n, the size of the population.
        """
        return None

    def distinct_perturbations(self, weight: torch.Size) -> float:  # noqa: ARG002  for subclasses
        """Return how many different E_m a step can have for a weight [g, o, i, *taps], or an upper bound."""
        return math.inf

    def noise_std(self, weight: Tensor, sigma: float) -> Tensor | float:  # noqa: ARG002  for subclasses
        """Return the standard deviation of E_m's entries; it is 1 unless the noise scales with the weight."""
        return 1.0

    # Optional: minimum work.

    def flops(self, weight: torch.Size, members: int) -> Flops | None:  # noqa: ARG002  for subclasses
        """Return a lower bound of the arithmetic for a weight [g, o, i, *taps], or None if it is unknown."""
        return None

    def read_bytes(self, weight: Tensor, noise: N) -> int:
        """Return the bytes of W and of the noise that a forward has to read."""
        return weight.nbytes + noise.nbytes


AnyScheme = AbstractScheme[Any]
"""A scheme with any kind of noise."""


class AbstractAdditiveScheme(AbstractScheme[N]):
    """A scheme whose forward adds a correction to the unperturbed output: x W^T + sigma * x E_m^T."""

    @abstractmethod
    def correction(self, op: AbstractOperator, noise: N, x: Tensor) -> Tensor:
        """Apply each member's E_m to its rows: [r, m, g, i, *s] -> a new tensor [r, m, g, o, *s']."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        """Add sigma times the correction to the product with the shared weight."""
        return op.add_shared_to(self.correction(op, noise, x), sigma, x, weight)


class AbstractDenseScheme(AbstractScheme[N]):
    """A scheme with independent members. Chunks of members have their E_m written out in turn.

    Subclasses define ``sample`` and ``dense_noise``, and :meth:`pieces` if E_m is not stored.
    """

    def pieces(self, noise: N, members: int) -> Iterable[tuple[int, int, N]]:
        """Return (start, stop) of each chunk of members, and its noise; 0 is the first member of ``noise``.

        The dense noise of the chunks is written out once each, in this order.
        """
        return [(0, members, noise)]

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_shared(x, weight)
        for start, stop, piece in self.pieces(noise, x.shape[1]):
            # No variable keeps a chunk's dense noise, which is freed before the next is written out.
            correction = op.apply_per_member(x[:, start:stop], self.dense_noise(piece))
            add_scaled(y[:, start:stop], correction, sigma)
        return y

    @override
    def weighted_sum(self, noise: N, utilities: Tensor) -> Tensor:
        def sum_piece(start: int, stop: int, piece: N) -> Tensor:
            dense = self.dense_noise(piece)
            rows = dense.reshape(stop - start, -1)
            return torch.mv(rows.mT, utilities[start:stop]).view(dense.shape[1:])

        return sum_pieces(sum_piece(*piece) for piece in self.pieces(noise, len(utilities)))

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        return 0.0

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        # One product is enough: W + sigma E_m can be formed while E_m is read.
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)


class AbstractRowScheme(AbstractScheme[N]):
    """A scheme whose update is computed from the layers' inputs (rows): node perturbation.

    The update is the sum over rows x of (c / v) d<u, W x>/dW. Here c is the row's utility, u = sigma E_m x is
    the change of its output, constant in the derivative, and v = Var(sigma E) / W^2. c u estimates the
    gradient with respect to the output (Werfel, Xie and Seung 2005). With antithetic sampling c is half the
    difference of a member's two utilities, negated for rows that see the negated noise.
    """

    @property
    @override
    def learns_from_rows(self) -> bool:
        return True

    @abstractmethod
    def node_gradient(
        self, op: AbstractOperator, weight: Tensor, noise: N, utilities: Tensor, x: Tensor
    ) -> Tensor:
        """Return the sum of the rows' estimates of d utility / dW, [g, o, i, *taps].

        Args:
            op: the operator that the layer was called with.
            weight: W, [g, o, i, *taps].
            noise: noise of the m members.
            utilities: c for each row, [r, m].
            x: the layer's input, as activations [r, m, g, i, *space].
        """


class AbstractWrapper(AbstractScheme[N]):
    """Another implementation of a scheme's forward and update, such as a fused kernel.

    All other methods are those of :attr:`plain`, which must not draw binary weights. Subclasses define
    ``plain``, ``forward``, ``weighted_sum`` and ``why_unsupported``.
    """

    @property
    @abstractmethod
    def plain(self) -> AbstractScheme[N]:
        """The scheme that is implemented."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        return self.plain.sample(weight, stream)

    @override
    def forward_transposed(
        self, op: TransposedLinear, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        return self.plain.forward_transposed(op, weight, noise, x, sigma)

    @override
    def dense_noise(self, noise: N) -> Tensor:
        return self.plain.dense_noise(noise)

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return self.plain.prepare(noise, weight, sigma)

    @property
    @override
    def stores_weight(self) -> bool:
        return self.plain.stores_weight

    @override
    def is_up_to_date(self, noise: N, weight: Tensor) -> bool:
        return self.plain.is_up_to_date(noise, weight)

    @property
    @override
    def learns_from_rows(self) -> bool:
        return self.plain.learns_from_rows

    @property
    @override
    def is_biased(self) -> bool:
        return self.plain.is_biased

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa(weight, members)

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        return self.plain.distinct_perturbations(weight)

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor | float:
        return self.plain.noise_std(weight, sigma)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops | None:
        return self.plain.flops(weight, members)

    @override
    def read_bytes(self, weight: Tensor, noise: N) -> int:
        return self.plain.read_bytes(weight, noise)


def add_scaled(y: Tensor, correction: Tensor, sigma: float | Tensor) -> Tensor:
    """Add sigma * correction to y in place, in one pass."""
    if isinstance(sigma, Tensor):
        return y.addcmul_(correction, sigma)
    return y.add_(correction, alpha=sigma)


def inverse_participation_ratio(squares: Tensor) -> float | None:
    """Return sum s^2 / (sum s)^2 for squares s: 1 / n if n squares are equal, 1 if only one is not 0.

    Return None if all are 0.
    """
    values = squares.double()
    total = float(values.sum())
    return float(values.square().sum()) / total**2 if total else None


def check_count(name: str, value: object, minimum: int = 1) -> None:
    """Raise a ValueError unless an option is an int of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        message = f"{name} must be an int of at least {minimum}, got {value!r}"
        raise ValueError(message)


def check_choice(name: str, value: object, *choices: str) -> None:
    """Raise a ValueError unless an option is one of the choices."""
    if value not in choices:
        *others, last = map(repr, choices)
        message = f"{name} must be {', '.join(others)} or {last}, got {value!r}"
        raise ValueError(message)


def check_probability(name: str, value: object) -> None:
    """Raise a ValueError unless an option is a number strictly between 0 and 1."""
    if not isinstance(value, int | float) or not 0 < value < 1:
        message = f"{name} must be a number between 0 and 1, got {value!r}"
        raise ValueError(message)


def check_fraction(name: str, value: object) -> None:
    """Raise a ValueError unless an option is a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        message = f"{name} must be a number above 0 and at most 1, got {value!r}"
        raise ValueError(message)
