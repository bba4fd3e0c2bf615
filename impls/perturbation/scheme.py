"""The interface of a scheme: how a perturbation is drawn, applied and summed into an update.

A scheme is the mathematics of a perturbation: member m sees the weight W + sigma E_m, where the entries of
E_m have mean 0 and variance 1. Weights are [g, o, i, *taps]; :mod:`impls.perturbation.member_ops` has the
meaning of the axes. Sigma, the bias and its noise, antithetic halves and the layout of rows are handled by
:mod:`impls.perturbation.layer`, for all schemes.

A scheme has to define four methods: ``sample``, ``forward`` (or ``correction``, see
:class:`AbstractAdditiveScheme`), ``weighted_sum`` and ``dense_noise``. Everything else has a default.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.perturbation.member_ops import sum_pieces
from impls.perturbation.noise import Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator

N = TypeVar("N", bound=Noise)


class TensorRef:
    """A reference to a tensor that noise depends on but does not own, such as the weight it is scaled by.

    It does not count towards the noise's memory, and :meth:`Noise.narrow` does not change it.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Refer to a tensor; the reference follows later changes in place."""
        self.tensor = tensor


class Flops(NamedTuple):
    """A lower bound of a scheme's arithmetic; a multiplication and an addition count as two.

    It holds for every implementation that reads the noise as the scheme stores it. Drawing noise counts as 0.

    Attributes:
        forward: flops of one row at one output position.
        update: flops of the sum over the whole population; for a scheme that learns from rows, of one row at
            one output position.

    """

    forward: int
    update: int


class AbstractScheme(ABC, Generic[N]):
    """How noise is drawn, applied to rows and summed into an update.

    Implementations are frozen dataclasses of their options. They call an operator's methods without checking
    its type.
    """

    # Required.

    @abstractmethod
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        """Draw the noise of the stream's members for a weight [g, o, i, *taps].

        Raises:
            ValueError: an option does not fit the weight's shape; the message has the numbers.

        """

    @abstractmethod
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        """Apply each member's weight W + sigma E_m to its rows.

        Args:
            op: the layer's operator.
            weight: W, [g, o, i, *taps].
            noise: noise of the members in x.
            x: activations [r, m, g, i, *space].
            sigma: a number, or a tensor [r, 1, ...] with one signed value for each repeat, where antithetic
                halves use the negated noise.

        Returns:
            A new tensor [r, m, g, o, *space'].

        """

    @abstractmethod
    def weighted_sum(self, noise: N, utilities: Tensor) -> Tensor:
        """Return the sum over members of utilities[m] * E_m, [g, o, i, *taps].

        Args:
            noise: noise of the members.
            utilities: [m], in the noise's dtype.

        """

    @abstractmethod
    def dense_noise(self, noise: N) -> Tensor:
        """Return every E_m as a dense tensor, [m, g, o, i, *taps].

        This is the reference implementation: ``forward`` and ``weighted_sum`` are tested against it.
        """

    # Optional: what the scheme supports.

    draws_binary_weights = False
    """Whether members have binary weights; only layers whose weights are logits take such a scheme."""

    def supports(self, module: nn.Module) -> str:  # noqa: ARG002  for subclasses
        """Return why the scheme does not support a layer on its device, or ``""`` if it does."""
        return ""

    @property
    def stream(self) -> str:
        """Name of the kind of stream that the scheme draws from by default."""
        return "block"

    @property
    def shard_multiple(self) -> int:
        """A population may be split at multiples of this number, if its stream allows it too."""
        return 1

    @property
    def supports_antithetic(self) -> bool:
        """Whether members may see W - sigma E_m, as antithetic sampling needs."""
        return True

    @property
    def learns_from_rows(self) -> bool:
        """Whether the update needs the layers' inputs, see :class:`AbstractRowScheme`."""
        return False

    # Optional: another form of the noise, of the weight or of the update.

    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:  # noqa: ARG002  for subclasses
        """Convert drawn noise to the form that ``forward`` reads; by default it is read as drawn."""
        return noise

    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        """Return the plain layer's weight for a member with noise sigma E_m = ``change``."""
        return weight + change

    def update_directions(self, noise: N) -> Tensor:
        """Return the tensors D_m that the update multiplies by utilities, [m, g, o, i, *taps].

        They are E_m, unless :attr:`update_directions_differ`.
        """
        return self.dense_noise(noise)

    @property
    def update_directions_differ(self) -> bool:
        """Whether D_m is not a multiple of E_m; the expected update is still the gradient."""
        return False

    # Optional: quality.

    def kappa(self, weight: Tensor, members: int) -> float | None:  # noqa: ARG002  for subclasses
        """Return the closed form of kappa in the quality law, or None if it is unknown.

        For a locally linear fitness with centered utilities, a generic gradient G and d weights, the estimate
        g = sum_m c_m E_m has cos^2(g, G) = 1 / (1 + kappa + d / n). So n members with dependent E_m give as
        good an estimate as n_eff = n / (1 + kappa n / d) independent ones.

        Args:
            weight: W, [g, o, i, *taps]; only its shape counts, unless the noise scales with it.
            members: members of the population.

        """
        return None

    def noise_std(self, weight: Tensor, sigma: float) -> Tensor | float:  # noqa: ARG002  for subclasses
        """Return the standard deviation of E_m's entries; it is 1 unless the noise scales with the weight."""
        return 1.0

    # Optional: minimum work.

    def flops(self, weight: torch.Size, members: int) -> Flops | None:  # noqa: ARG002  for subclasses
        """Return a lower bound of the arithmetic for a weight [g, o, i, *taps]; None: not declared."""
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
    """Independent entries for every member; E_m is materialized for a chunk of members at a time.

    Subclasses define ``sample`` and ``dense_noise``, and :meth:`pieces` if E_m are not stored.
    """

    def pieces(self, noise: N, members: int) -> Iterable[tuple[int, int]]:  # noqa: ARG002  for subclasses
        """Return the (start, stop) range of members of each chunk; 0 is the first member in ``noise``."""
        return [(0, members)]

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y = op.apply_shared(x, weight)
        for start, stop in self.pieces(noise, x.shape[1]):
            # The dense noise of a chunk is freed before that of the next one is materialized.
            part = op.apply_per_member(x[:, start:stop], self.dense_noise(noise.narrow(start, stop)))
            add(y[:, start:stop], part, sigma)
        return y

    @override
    def weighted_sum(self, noise: N, utilities: Tensor) -> Tensor:
        def part(start: int, stop: int) -> Tensor:
            dense = self.dense_noise(noise.narrow(start, stop))
            return torch.mv(dense.flatten(1).mT, utilities[start:stop]).view(dense.shape[1:])

        return sum_pieces(part(*piece) for piece in self.pieces(noise, len(utilities)))

    @override
    def kappa(self, weight: Tensor, members: int) -> float:
        return 0.0

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        # One product: W + sigma E_m can be formed while E_m is read or drawn, and drawing counts as 0.
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)


class AbstractRowScheme(AbstractScheme[N]):
    """A scheme whose update is computed from the layers' inputs (rows): node perturbation.

    The noise adds u = (W + sigma E_m) x - W x to a row's output and so moves the utility. u times the utility
    estimates the gradient with respect to the output, and is multiplied by the layer's Jacobian as in
    backpropagation: the sum over rows of c / v * d<u, W x>/dW, with v = Var(sigma E) / W^2. For antithetic
    halves c is half the difference of the two utilities, with the sign of the row's noise.
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
            weight: W, as the forward used it.
            noise: noise of the members in x.
            utilities: [r, m], one for each row, negated where the row saw the negated noise.
            x: activations [r, m, g, i, *space] that the layer was called with.

        """


class AbstractWrapper(AbstractScheme[N]):
    """A different implementation of a scheme, such as a fused kernel.

    Noise, reference implementation, quality and minimum work are those of :attr:`plain`, which must not draw
    binary weights. Subclasses define ``plain``, ``forward``, ``weighted_sum`` and ``supports``.
    """

    @property
    @abstractmethod
    def plain(self) -> AbstractScheme[N]:
        """The scheme that is wrapped."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> N:
        return self.plain.sample(weight, stream)

    @override
    def dense_noise(self, noise: N) -> Tensor:
        return self.plain.dense_noise(noise)

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return self.plain.prepare(noise, weight, sigma)

    @property
    @override
    def learns_from_rows(self) -> bool:
        return self.plain.learns_from_rows

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        return self.plain.kappa(weight, members)

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor | float:
        return self.plain.noise_std(weight, sigma)

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops | None:
        return self.plain.flops(weight, members)

    @override
    def read_bytes(self, weight: Tensor, noise: N) -> int:
        return self.plain.read_bytes(weight, noise)


def add(y: Tensor, correction: Tensor, sigma: float | Tensor) -> Tensor:
    """Add sigma * correction to y in place, in one pass."""
    if isinstance(sigma, Tensor):
        return y.addcmul_(correction, sigma)
    return y.add_(correction, alpha=sigma)


def inverse_participation_ratio(squares: Tensor) -> float | None:
    """Return sum l^2 / (sum l)^2 of squared lengths l: 1 / n for n equal ones, 1 for a single non-zero one.

    None where all are zero.
    """
    lengths = squares.double()
    total = float(lengths.sum())
    return float(lengths.square().sum()) / total**2 if total else None


def check_count(name: str, value: object, least: int = 1) -> None:
    """Check that an option is an int of at least ``least``.

    Raises:
        ValueError: it is not; the message has the option's name and value.

    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        message = f"{name} must be an int of at least {least}, got {value!r}"
        raise ValueError(message)


def check_choice(name: str, value: object, *choices: str) -> None:
    """Check that an option is one of the choices.

    Raises:
        ValueError: it is not; the message has the option's name and value.

    """
    if value not in choices:
        *most, last = map(repr, choices)
        message = f"{name} must be {', '.join(most)} or {last}, got {value!r}"
        raise ValueError(message)


def check_probability(name: str, value: object) -> None:
    """Check that an option is a number strictly between 0 and 1.

    Raises:
        ValueError: it is not; the message has the option's name and value.

    """
    if not isinstance(value, int | float) or not 0 < value < 1:
        message = f"{name} must be a number between 0 and 1, got {value!r}"
        raise ValueError(message)


def check_fraction(name: str, value: object) -> None:
    """Check that an option is a share of channels, above 0 and at most 1.

    Raises:
        ValueError: it is not; the message has the option's name and value.

    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        message = f"{name} must be in (0, 1], got {value!r}"
        raise ValueError(message)
