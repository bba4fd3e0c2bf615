"""Dropout as the only noise: inputs, outputs or weights are dropped at random, and the others scaled up.

A gate g is 1 with probability q = 1 - p, and multiplies a value by g / q = 1 + xi, where xi has mean 0 and
variance v = p / q. So sigma E_m = W * xi_m: the size of the noise depends on p, not on sigma. The update, a
sum of c_m E_m / sigma, is proportional to 1 / sigma^2; with sigma = 1 it is the sum of c_m W * xi_m. Updates
from rows do not depend on sigma.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import variant
from impls.perturbation.member_ops import append_axes, count_signs, draw_signs, sum_pieces
from impls.perturbation.noise import Noise, NoiseStream, pieces
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import (
    AbstractRowScheme,
    AbstractScheme,
    Flops,
    TensorRef,
    check_choice,
    check_probability,
    inverse_participation_ratio,
)

FAIR = 0.5
"""The p whose gates are fair coins: each takes one random bit."""

PIECE_BYTES = 2**25
"""Bytes of members' weights that are computed at a time."""


@dataclass(frozen=True, eq=False)
class AbstractDropoutNoise(Noise):
    """Noise that is a multiple of the weight.

    Attributes:
        weight: a reference to W.
        sigma: the scale that E_m is divided by.
    """

    weight: TensorRef
    sigma: float


N = TypeVar("N", bound=AbstractDropoutNoise)


class AbstractDropout(AbstractScheme[N]):
    """A scheme whose noise is W times a random factor: sigma E_m = W * xi_m."""

    p: float
    """Probability of dropping a value."""

    @property
    @override
    def is_biased(self) -> bool:
        # The mean update of a weight w is w times the sum of W * gradient over the weights of its gate.
        # Updates from rows are weighted by the outputs' squares.
        return True

    def variance(self, weight: torch.Size) -> float:  # noqa: ARG002  for subclasses
        """Return v, the variance of xi, for a weight [g, o, i, *taps]."""
        return self.p / (1 - self.p)

    @override
    def prepare(self, noise: N, weight: Tensor, sigma: float) -> N:
        return replace(noise, sigma=sigma)

    @override
    def noise_std(self, weight: Tensor, sigma: float) -> Tensor:
        return weight.abs() * (math.sqrt(self.variance(weight.shape)) / sigma)


class AbstractWeightDropout(AbstractDropout[N]):
    """Dropout whose members have their own products: those of the kept weights, scaled up."""

    @abstractmethod
    def apply_gated_weights(self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor) -> Tensor:
        """Apply each member's weight W (1 + xi_m) to its rows."""

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: N, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        y, ratio = self.apply_gated_weights(op, weight, noise, x), sigma / noise.sigma
        # Antithetic rows have a negative sigma: W - sigma E = 2 W - (W + sigma E), which is ratio = -1.
        return y if _is_one(ratio) else _scale_perturbation(op.apply_shared(x, weight), y, ratio)


@dataclass(frozen=True, eq=False)
class DropoutNoise(AbstractDropoutNoise):
    """Each member's gates, of channels or of weights.

    Attributes:
        kept: bool, [m, g, i] (inputs), [m, g, o] (outputs) or [m, g, o, i, *taps] (weights).
    """

    SHARED = frozenset({"sigma"})

    kept: Tensor


def _draw_gates(stream: NoiseStream, p: float, *shape: int) -> Tensor:
    """Draw which values are kept, with probability 1 - p: bool [m, *shape]."""
    if p == FAIR:
        return draw_signs(stream, "kept", *shape) > 0
    return stream.uniform("kept", *shape) >= p


def _xi(kept: Tensor, p: float, like: Tensor) -> Tensor:
    """Return xi in the dtype of ``like``: 1 / q - 1 = p / q for kept values, -1 for dropped ones."""
    return torch.where(kept, like.new_full((), p / (1 - p)), -1.0)


def _apply_gates(values: Tensor, kept: Tensor, p: float) -> Tensor:
    """Multiply kept values by 1 / q and the others by 0."""
    # addcmul computes 0 + 1 / q * values * kept in one pass over memory.
    return torch.addcmul(values.new_zeros(()), values, kept, value=1 / (1 - p))


def _scale_perturbation(plain: Tensor, dropped: Tensor, ratio: float | Tensor) -> Tensor:
    """Return plain + ratio * (dropped - plain); a negative ratio negates the perturbation."""
    return torch.lerp(plain, dropped, ratio.to(plain.dtype) if isinstance(ratio, Tensor) else ratio)


def _kappa_of_gates(weight: Tensor, squares: Tensor) -> float | None:
    """Return kappa if a gate multiplies weights with a sum of squares l: d sum l^2 / (sum l)^2 - 1."""
    ratio = inverse_participation_ratio(squares)
    return None if ratio is None else weight.numel() * ratio - 1


def _is_one(ratio: float | Tensor) -> bool:
    """Return whether no row has another sigma than the noise; a tensor has those of antithetic rows."""
    return not isinstance(ratio, Tensor) and ratio == 1


@variant(
    side=("in", "out"),
    source="Srivastava et al. 2014 (dropout); Werfel, Xie, Seung 2005 (the update of outputs)",
)
@dataclass(frozen=True)
class DropoutMask(AbstractDropout[DropoutNoise], AbstractRowScheme[DropoutNoise]):
    """Each member drops random input or output channels, with probability p.

    ``side="in"`` updates by sum_m c_m E_m, which is W with rescaled columns for any utilities: it learns the
    importance of each input, and cannot learn an arbitrary W.

    ``side="out"`` learns W from rows, by node perturbation. With Y the unperturbed outputs, the update is
    ((c * xi * Y) / v)^T X. Its mean over all masks is q * sum over rows of (E[c | on] - E[c | off]) Y^T X for
    each output. For small effects this is the gradient with each row weighted by Y^2. Dividing by Y instead
    of multiplying would remove this weighting, but give an estimate of infinite variance.

    Memory    g * (i or o) bytes per member.
    Work      one pass over inputs or outputs; the update of ``out`` is two products, as in backpropagation.
    Quality   on inputs kappa = d sum l^2 / (sum l)^2 - 1 for columns of squared lengths l, o * taps + 1 for
              Gaussian weights; the cosine is then at most 1 / sqrt(o * taps + 2). On outputs it depends on
              the rows, and there is no closed form.
    """

    p: float = 0.5
    side: Literal["in", "out"] = "in"

    def __post_init__(self) -> None:
        check_probability("p", self.p)
        check_choice("side", self.side, "in", "out")

    @property
    @override
    def learns_from_rows(self) -> bool:
        return self.side == "out"

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DropoutNoise:
        groups, outputs, inputs = weight.shape[:3]
        width = inputs if self.side == "in" else outputs
        return DropoutNoise(TensorRef(weight), sigma=1.0, kept=_draw_gates(stream, self.p, groups, width))

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: DropoutNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        # One product, also for antithetic halves: channels are multiplied by 1 + xi, or 1 - xi.
        if self.side == "in":
            return op.apply_shared(self._drop(x, noise, sigma), weight)
        return self._drop(op.apply_shared(x, weight), noise, sigma)

    @override
    def node_gradient(
        self, op: AbstractOperator, weight: Tensor, noise: DropoutNoise, utilities: Tensor, x: Tensor
    ) -> Tensor:
        y, vjp = torch.func.vjp(lambda w: op.apply_shared(x, w), weight)  # type: ignore[misc]  # 2-tuple
        change = y * append_axes(_xi(noise.kept, self.p, y), y[0])
        total: Tensor = vjp(change * append_axes(utilities / self.variance(weight.shape), y))[0]
        return total

    @override
    def weighted_sum(self, noise: DropoutNoise, utilities: Tensor) -> Tensor:
        weight = noise.weight.tensor
        xi = torch.tensordot(utilities, _xi(noise.kept, self.p, utilities), dims=1)
        return weight * append_axes(self._broadcast(xi), weight) / noise.sigma

    @override
    def dense_noise(self, noise: DropoutNoise) -> Tensor:
        weight = noise.weight.tensor.unsqueeze(0)
        xi = _xi(noise.kept, self.p, weight)
        return weight * append_axes(self._broadcast(xi), weight) / noise.sigma

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        # <E_m, E_m'> is the sum over columns of xi xi' times the column's squared length.
        columns = weight.double().square().transpose(1, 2).flatten(2).sum(2)
        return None if self.side == "out" else _kappa_of_gates(weight, columns)

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        return count_signs(weight[0] * weight[2 if self.side == "in" else 1])

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        product, groups, inputs = 2 * weight.numel(), weight[0], weight[2]
        rescaling = 2 * groups * inputs * members + weight.numel()
        return Flops(forward=product, update=2 * product if self.learns_from_rows else rescaling)

    def _drop(self, values: Tensor, noise: DropoutNoise, sigma: float | Tensor) -> Tensor:
        """Multiply channels by 1 + xi, or by 1 - xi if sigma is negative."""
        dropped = _apply_gates(values, append_axes(noise.kept, values[0]), self.p)
        ratio = sigma / noise.sigma
        return dropped if _is_one(ratio) else _scale_perturbation(values, dropped, ratio)

    def _broadcast(self, xi: Tensor) -> Tensor:
        """View factors of channels [..., g, c] so that they broadcast to [..., g, o, i]."""
        return xi.unsqueeze(-2 if self.side == "in" else -1)


@variant(source="Wan et al. 2013 (DropConnect)")
@dataclass(frozen=True)
class DropConnect(AbstractWeightDropout[DropoutNoise]):
    """Each member drops random weights, each with probability p.

    Memory    g * o * i * taps bytes per member.
    Work      one product per member, bound by reading the gates; weights are computed piece by piece.
    Quality   kappa = E[w^4] / E[w^2]^2 - 1 for entries w of W: 2 if Gaussian, 0.8 if uniform. The update
              estimates the gradient with each entry multiplied by W^2.
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        check_probability("p", self.p)

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> DropoutNoise:
        kept = torch.empty(len(stream.members), *weight.shape, dtype=torch.bool, device=stream.device)
        if kept.device.type != "meta":
            # The uniform numbers take more memory than the gates, so they are drawn in pieces.
            for start, stop, part in stream.split(weight.numel(), PIECE_BYTES):
                kept[start:stop] = _draw_gates(part, self.p, *weight.shape)
        return DropoutNoise(TensorRef(weight), sigma=1.0, kept=kept)

    @override
    def apply_gated_weights(
        self, op: AbstractOperator, weight: Tensor, noise: DropoutNoise, x: Tensor
    ) -> Tensor:
        outputs = [
            op.apply_per_member(x[:, start:stop], _apply_gates(weight, noise.kept[start:stop], self.p))
            for start, stop in pieces(x.shape[1], weight.nbytes, PIECE_BYTES)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    @override
    def weighted_sum(self, noise: DropoutNoise, utilities: Tensor) -> Tensor:
        weight = noise.weight.tensor
        total = sum_pieces(
            torch.mv(_xi(noise.kept[start:stop], self.p, utilities).flatten(1).mT, utilities[start:stop])
            for start, stop in pieces(len(utilities), weight.nbytes, PIECE_BYTES)
        )
        return weight * total.view_as(weight) / noise.sigma

    @override
    def dense_noise(self, noise: DropoutNoise) -> Tensor:
        return noise.weight.tensor * _xi(noise.kept, self.p, noise.weight.tensor) / noise.sigma

    @override
    def kappa(self, weight: Tensor, members: int) -> float | None:
        return _kappa_of_gates(weight, weight.double().square())

    @override
    def distinct_perturbations(self, weight: torch.Size) -> float:
        return count_signs(weight.numel())

    @override
    def flops(self, weight: torch.Size, members: int) -> Flops:
        return Flops(forward=2 * weight.numel(), update=2 * weight.numel() * members)
