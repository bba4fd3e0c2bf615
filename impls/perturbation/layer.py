"""One layer of a model with its scheme: sample its noise, run it for each member, sum its update.

Sigma, the bias and its noise, and the antithetic halves are handled here, once for all schemes.
"""

import dataclasses
import difflib
import fnmatch
import functools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from typing_extensions import override

from impls.perturbation.errors import UnsupportedError
from impls.perturbation.noise import STREAMS, Noise, NoiseStream, is_overwritable
from impls.perturbation.operators import (
    AbstractOperator,
    ChannelAffine,
    TransposedLinear,
    has_equal_members,
)
from impls.perturbation.scheme import (
    AbstractDenseScheme,
    AbstractRowScheme,
    AbstractWrapper,
    AnyScheme,
    TensorRef,
)

NORMALIZATIONS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
"""Modules whose scale and shift get independent normal noise, whatever the scheme."""


class AbstractLogitLayer(nn.Module):
    """A layer whose weight holds logits: members have binary weights, drawn with these probabilities."""


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)

SUPPORTED = (
    nn.Linear,
    nn.Embedding,
    nn.MultiheadAttention,
    AbstractLogitLayer,
    *CONVOLUTIONS,
    *TRANSPOSED_CONVOLUTIONS,
    *RECURRENT,
    *NORMALIZATIONS,
)
"""Layers of torch whose functions are perturbed; the parameters of other modules are their own parameters."""

UNSUPPORTED = (nn.Bilinear, nn.EmbeddingBag, nn.modules.adaptive.AdaptiveLogSoftmaxWithLoss)
"""Layers of torch that cannot be perturbed."""


@dataclass(frozen=True, eq=False)
class ScaleNoise(Noise):
    """Noise of a parameter that is not a matrix, [m, *parameter]."""

    values: Tensor


@dataclass(frozen=True)
class ScaleScheme(AbstractDenseScheme[ScaleNoise]):
    """Independent standard normal noise for the scale of a normalization, or a module's own parameter."""

    @override
    def sample(self, weight: Tensor, stream: NoiseStream) -> ScaleNoise:
        return ScaleNoise(stream.normal("dense", *weight.shape))

    @override
    def forward(
        self, op: AbstractOperator, weight: Tensor, noise: ScaleNoise, x: Tensor, sigma: float | Tensor
    ) -> Tensor:
        values = noise.values
        if not isinstance(op, ChannelAffine) or weight.dtype.itemsize < torch.float32.itemsize:
            return super().forward(op, weight, noise, x, sigma)
        # The members' scales W + sigma E_m are small: written out, they take one pass over the activations.
        if not isinstance(sigma, Tensor):
            return op.apply_per_member(x, weight + sigma * values)
        # Antithetic halves: sigma is the same for all repeats of a half.
        sides = sigma.view(2, -1)[:, :1].view(2, *[1] * values.dim())
        scales = op.bias((weight + sides * values).flatten(0, 1), x).unflatten(0, (2, -1))
        return (x.unflatten(0, (2, -1)) * scales.unsqueeze(1)).flatten(0, 1)

    @override
    def dense_noise(self, noise: ScaleNoise) -> Tensor:
        return noise.values


@dataclass(frozen=True, eq=False)
class LayerNoise:
    """Noise of one layer for a range of members.

    Attributes:
        weight: the scheme's noise of the weight.
        bias: dense noise [m, *bias]; None for a layer without bias.
        drawn_for: if the scheme stores the weight, its address and the number of its in-place changes when
            the noise was drawn.
    """

    weight: Noise
    bias: Tensor | None
    drawn_for: tuple[int, int] | None

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def narrow(self, start: int, stop: int) -> "LayerNoise":
        """Return the noise of members ``start`` to ``stop``; 0 is the first member of this noise."""
        bias = None if self.bias is None else self.bias[start:stop]
        return LayerNoise(self.weight.narrow(start, stop), bias, self.drawn_for)


class LayerCall(NamedTuple):
    """One call of a layer.

    Attributes:
        operator: the operator that the layer was called with.
        rows: its input [repeats * members, ...], not copied.
        version: the number of in-place changes of ``rows`` before the call, as torch counts them.
    """

    operator: AbstractOperator
    rows: Tensor
    version: int

    @classmethod
    def of(cls, operator: AbstractOperator, rows: Tensor) -> "LayerCall":
        """Record a call."""
        return cls(operator, rows, version_of(rows))


@dataclass(frozen=True)
class RepeatedBatch:
    """A batch whose rows all members see.

    Attributes:
        x: a copy of the batch [batch, ...].
        version: the number of in-place changes of the population's rows when they were made, as torch counts
            them.
    """

    x: Tensor
    version: int

    def is_in(self, rows: Tensor, times: int) -> bool:
        """Return whether rows that were this batch many times are unchanged, as torch counts it."""
        return self.version == version_of(rows) and len(rows) == times * len(self.x)


def version_of(tensor: Tensor) -> int:
    """Return the number of a tensor's in-place changes, as torch counts them: 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  no public name


@dataclass(frozen=True, eq=False)
class PerturbedLayer:
    """A weight with its bias, and the scheme that perturbs them.

    Attributes:
        name: the module's name in its model; where a module has several weights, or its own parameters, the
            name of the weight.
        weight: the parameter, in torch's shape.
        bias: the parameter, or None.
        scheme: how the weight is perturbed.
        groups: groups of a convolution, 1 for other layers; None for a normalization.
        module: the module that has the parameters.
        weight_name: the weight's name in its module.
        bias_name: the bias's name in its module.
        sigma_ratio: its sigma divided by that of its population.
    """

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    scheme: AnyScheme
    groups: int | None
    module: nn.Module
    weight_name: str = "weight"
    bias_name: str = "bias"
    sigma_ratio: float = 1.0

    @classmethod
    def all_of(cls, name: str, module: nn.Module, scheme: AnyScheme) -> "list[PerturbedLayer]":
        """Pair each weight of a supported module with a scheme.

        Raises:
            UnsupportedError: as for :meth:`of`.
        """
        return [cls.of(name, module, scheme, *names) for names in _parameter_names(module)]

    @classmethod
    def of(
        cls,
        module_name: str,
        module: nn.Module,
        scheme: AnyScheme,
        weight_name: str = "weight",
        bias_name: str = "bias",
    ) -> "PerturbedLayer":
        """Pair a weight of a supported module with a scheme.

        Raises:
            UnsupportedError: the scheme does not support the module, or an option does not fit the weight.
        """
        is_dense = (
            isinstance(module, NORMALIZATIONS)
            or not isinstance(module, SUPPORTED)
            or is_parametrized(module)
            or weight_name in {"in_proj_bias", "bias_k", "bias_v"}
        )
        groups = None if is_dense else getattr(module, "groups", 1)
        layer_scheme: AnyScheme = ScaleScheme() if is_dense else scheme
        name = module_name
        if weight_name != "weight":
            name = f"{module_name}.{weight_name}".removeprefix(".")
        label = name or type(module).__name__
        if isinstance(module, AbstractLogitLayer) != layer_scheme.draws_binary_weights:
            message = (
                f"{label}: {scheme} does not support {type(module).__name__}: binary layers "
                "(BinarizedLinear, BinarizedConv2d) need Binary() or BinaryMixture(), others another scheme"
            )
            raise UnsupportedError(message)
        if isinstance(module, nn.Embedding) and layer_scheme.learns_from_rows:
            message = f"{label}: {scheme} learns from a layer's inputs, but those of an Embedding are tokens"
            raise UnsupportedError(message)
        parameters = dict(module.named_parameters(recurse=False))
        weight, bias = parameters[weight_name], parameters.get(bias_name)
        if reason := layer_scheme.why_unsupported(module):
            message = f"{label}: {layer_scheme}: {reason}"
            raise UnsupportedError(message)
        layer = cls(name, weight, bias, layer_scheme, groups, module, weight_name, bias_name)
        grouped = layer.split_groups(weight.detach().to("meta"))
        if reason := _find_misfit(layer_scheme, grouped.shape, weight.dtype):
            message = f"{label}: {reason}"
            raise UnsupportedError(message)
        return layer

    @cached_property
    def is_own_parameter(self) -> bool:
        """Whether the weight is a module's own parameter, and not the weight of a layer of torch."""
        return not isinstance(self.module, SUPPORTED) or is_parametrized(self.module)

    @cached_property
    def padding_idx(self) -> int | None:
        """The token of padding of an Embedding, whose vector has no noise."""
        return self.module.padding_idx if isinstance(self.module, nn.Embedding) else None

    def dense_parameter_noise(self, parameter: Tensor, noise: LayerNoise) -> Tensor | None:
        """Return the noise of the weight or the bias if it is dense, [m, *shape]; else None."""
        if parameter is self.bias:
            return noise.bias
        return noise.weight.values if isinstance(noise.weight, ScaleNoise) else None

    def check_parameters(self) -> None:
        """Check that the module's parameters are still the same objects.

        Raises:
            ValueError: one was replaced by another object.
        """
        parameters = self.module._parameters  # noqa: SLF001  faster than attributes: Module.__getattr__ is Python
        if (
            parameters.get(self.weight_name) is not self.weight
            or parameters.get(self.bias_name) is not self.bias
        ):
            message = f"a parameter of layer {self.name!r} was replaced: call perturb() again"
            raise ValueError(message)

    def check_noise(self, noise: LayerNoise) -> None:
        """Check that the weight is the one that the noise was drawn for, where the noise depends on it.

        Raises:
            ValueError: the weight has changed and its scheme stores it, or ``weight.data`` was replaced.
        """
        if self.scheme.stores_weight and noise.drawn_for != self._weight_version():
            message = f"the weight of layer {self.name!r} has changed after sample(): call sample() again"
            raise ValueError(message)
        for field in vars(noise.weight).values():
            if isinstance(field, TensorRef) and field.tensor.data_ptr() != self.weight.data_ptr():
                message = (
                    f"weight.data of layer {self.name!r} was replaced after sample(): call sample() again"
                )
                raise ValueError(message)

    def check_dtypes(self, noise: LayerNoise) -> None:
        """Check that weight and bias have the dtypes that the noise was drawn for.

        Raises:
            ValueError: one has another dtype.
        """
        values = [(value, self.weight) for value in vars(noise.weight).values()]
        if self.bias is not None:
            values.append((noise.bias, self.bias))
        for value, parameter in values:
            is_float = isinstance(value, Tensor | NoiseStream) and value.dtype.is_floating_point
            if is_float and value.dtype is not parameter.dtype:
                message = (
                    f"the noise of layer {self.name!r} was drawn for a parameter in {value.dtype}, which is "
                    f"{parameter.dtype} now: call sample() again"
                )
                raise ValueError(message)

    def check_stored_weight(self, noise: LayerNoise) -> None:
        """Check the numbers of the weight that the noise stores, as torch does not count all changes.

        Raises:
            ValueError: the weight has changed.
        """
        if self.scheme.stores_weight and not self.scheme.is_up_to_date(
            noise.weight, self.split_groups(self.weight)
        ):
            message = (
                f"the weight of layer {self.name!r} has changed after sample(), by .data, NumPy or a fused "
                "optimizer: call sample() again before the next forward"
            )
            raise ValueError(message)

    @property
    def module_name(self) -> str:
        """The name of its module in the model."""
        return self.weight_path.removesuffix(self.weight_name).removesuffix(".")

    @property
    def weight_path(self) -> str:
        """The weight's name in the model."""
        return self.name if self.weight_name != "weight" else f"{self.name}.weight".removeprefix(".")

    @property
    def bias_path(self) -> str:
        """The bias's name in the model."""
        module_path = self.weight_path.removesuffix(self.weight_name)
        return f"{module_path}{self.bias_name}"

    @property
    def has_input_axis_first(self) -> bool:
        """Whether torch stores the weight as [g * i, o, *taps] and not as [g * o, i, *taps]."""
        return isinstance(self.module, TRANSPOSED_CONVOLUTIONS)

    def split_groups(self, weight: Tensor) -> Tensor:
        """View a tensor of the weight's shape as [g, o, i, *taps]; scales keep their shape."""
        if self.groups is None:
            return weight
        # Both views are faster than unflatten.
        grouped = weight.unsqueeze(0) if self.groups == 1 else weight.view(self.groups, -1, *weight.shape[1:])
        return grouped.transpose(1, 2) if self.has_input_axis_first else grouped

    def join_groups(self, values: Tensor) -> Tensor:
        """Return tensors [..., g, o, i, *taps] in the weight's shape, [..., *shape]; undo split_groups."""
        if self.groups is None:
            return values
        first = values.dim() - self.weight.dim() - 1
        if self.has_input_axis_first:
            values = values.transpose(first + 1, first + 2)
        return values.flatten(first, first + 1)

    @property
    def learns_from_rows(self) -> bool:
        """Whether the weight's update needs the layer's inputs."""
        return self.scheme.learns_from_rows

    def sample(  # noqa: PLR0913  the key of the noise, and how it is drawn
        self,
        seed: int,
        step: int | Tensor,
        members: range,
        *,
        sigma: float = 1.0,
        device: str | None = None,
        stream: type[NoiseStream] | None = None,
        out: LayerNoise | None = None,
    ) -> LayerNoise:
        """Draw the noise of some members.

        Args:
            seed: the population's seed.
            step: the training step.
            members: the members to draw for.
            sigma: the scale of the noise; only schemes that store perturbed weights read it.
            device: where to draw, by default the weight's device; on ``meta`` only shapes are made.
            stream: the class of the stream, by default the scheme's.
            out: noise whose memory is overwritten where it fits.
        """
        stream = STREAMS[self.scheme.stream] if stream is None else stream
        weight = self.split_groups(self.weight.detach()).to(device)
        memory = [] if out is None else out.weight.reusable_tensors()
        weight_stream = stream(
            seed, step, f"{self.name}.weight", members, weight.device, weight.dtype, memory=memory
        )
        noise = self.scheme.prepare(self.scheme.sample(weight, weight_stream), weight, sigma)
        memory.clear()  # a stream that the noise keeps must not keep the old memory alive
        drawn_for = self._weight_version() if self.scheme.stores_weight else None
        if self.bias is None:
            return LayerNoise(noise, None, drawn_for)
        if out is not None and out.bias is not None and is_overwritable(out.bias):
            memory = [out.bias]
        bias_stream = stream(
            seed, step, f"{self.name}.bias", members, weight.device, self.bias.dtype, memory=memory
        )
        return LayerNoise(noise, bias_stream.normal("dense", *self.bias.shape), drawn_for)

    def _weight_version(self) -> tuple[int, int]:
        """Return the address of the weight and the number of its in-place changes, as torch counts them."""
        return self.weight.data_ptr(), version_of(self.weight)

    def forward(  # noqa: PLR0913  a layer's call and its population's options
        self,
        op: AbstractOperator,
        rows: Tensor,
        noise: LayerNoise,
        members: int,
        sigma: float,
        *,
        antithetic: bool,
        batch: RepeatedBatch | None = None,
    ) -> Tensor:
        """Apply each member's weight and bias to its rows [repeats * members, ...].

        With ``antithetic`` the second half of the repeats uses the negated noise. If ``batch`` is given and
        ``rows`` have not changed since, each member's rows are those of the batch.
        """
        if _may_differentiate():
            if rows.requires_grad or _is_transformed():
                return self.forward_written_out(op, rows, noise, members, sigma, antithetic=antithetic)
            with torch.no_grad():
                return self.forward(op, rows, noise, members, sigma, antithetic=antithetic, batch=batch)
        if batch is None:
            x = op.from_batch(rows, members)
        else:
            x = self._activations(op, rows, members, batch, sides=1 + antithetic)
        scale: float | Tensor = sigma
        if antithetic:
            scale = torch.full((x.shape[0], *[1] * (x.dim() - 1)), sigma, dtype=x.dtype, device=x.device)
            scale[len(x) // 2 :].neg_()
        weight, weight_noise = self.split_groups(self.weight), noise.weight
        if self.groups is None and op.groups is not None:  # a matrix with dense noise
            assert isinstance(weight_noise, ScaleNoise)  # noqa: S101  that of parameters without groups
            weight, weight_noise = weight.unsqueeze(0), ScaleNoise(weight_noise.values.unsqueeze(1))
        if isinstance(op, TransposedLinear):
            y = self.scheme.forward_transposed(op, weight, weight_noise, x, scale)
        else:
            y = self.scheme.forward(op, weight, weight_noise, x, scale)
        if not isinstance(y, Tensor):
            message = f"{self.scheme}: forward returned {type(y).__name__}, not a tensor: correct the scheme"
            raise TypeError(message)
        if self.bias is not None and noise.bias is not None:
            member_bias = op.bias(torch.add(self.bias, noise.bias, alpha=sigma), y)
            if antithetic:
                negated = op.bias(torch.sub(self.bias, noise.bias, alpha=sigma), y)
                both = torch.stack([member_bias, negated])
                y.unflatten(0, (2, -1)).add_(both.unsqueeze(1))
            else:
                y.add_(member_bias)
        return op.to_batch(y, rows)

    def _activations(
        self, op: AbstractOperator, rows: Tensor, members: int, batch: RepeatedBatch, sides: int
    ) -> Tensor:
        """Convert rows that were a repeated batch to activations [r, m, ...].

        Those of a batch are a view with a member axis of stride 0: operators compute once what members share.
        """
        is_read_by_kernel = isinstance(self.scheme, AbstractWrapper)  # which needs rows
        if is_read_by_kernel or not batch.is_in(rows, sides * members):
            return op.from_batch(rows, members)
        x = op.from_batch(torch.cat([batch.x] * sides), 1)
        return x.expand(-1, members, *x.shape[2:])

    def forward_written_out(  # noqa: PLR0913  those of forward()
        self,
        op: AbstractOperator,
        rows: Tensor,
        noise: LayerNoise,
        members: int,
        sigma: float,
        *,
        antithetic: bool,
        reuses_noise: bool = False,
    ) -> Tensor:
        """Compute the forward with the members' written-out weights, which torch can differentiate.

        Schemes change tensors in place and write to ``out=``, which derivatives and vmap do not allow. The
        parameters get no gradient: they are not the members' weights. Antithetic halves are computed as
        twice the members. With ``reuses_noise`` many calls use this noise.
        """
        scales = (sigma, -sigma) if antithetic else (sigma,)
        dense, weight = self._written_out(noise), self.split_groups(self.weight.detach())
        weights = torch.cat([self.scheme.effective_weight(weight, scale * dense) for scale in scales])
        if self.groups is None and op.groups is not None:  # a matrix with dense noise
            weights = weights.unsqueeze(1)
        biases: Tensor | None = None
        if self.bias is not None and noise.bias is not None:
            bias = self.bias.detach()
            biases = torch.cat([torch.add(bias, noise.bias, alpha=scale) for scale in scales])
        x = op.from_batch(rows, members).unflatten(0, (len(scales), -1)).transpose(0, 1).flatten(1, 2)
        if has_equal_members(x):  # rows of one memory have different derivatives
            x = x.contiguous()
        y = op.apply_with_biases(x, weights, biases, reuses_weights=reuses_noise)
        y = y.unflatten(1, (len(scales), members)).transpose(0, 1).flatten(0, 1)
        return op.to_batch(y, rows)

    def _written_out(self, noise: LayerNoise) -> Tensor:
        """Return every E_m as a dense tensor, also inside of vmap, which refuses to draw random numbers."""
        with temporarily_clear_interpreter_stack():
            return self.scheme.dense_noise(noise.weight)

    def embed(
        self, tokens: Tensor, noise: LayerNoise, members: int, sigma: float, *, antithetic: bool
    ) -> Tensor:
        """Look tokens [repeats * members, *s] up in each member's table -> [repeats * members, *s, features].

        The vector of padding is not perturbed. ``antithetic`` is as for :meth:`forward`.
        """
        grouped = tokens.unflatten(0, (-1, members))
        scheme, table = self.scheme, noise.weight
        if _is_transformed():
            scheme, table = ScaleScheme(), ScaleNoise(self._written_out(noise))
        change = scheme.lookup(table, grouped.transpose(0, 1).flatten(1))
        change = change.unflatten(1, (len(grouped), *tokens.shape[1:])).transpose(0, 1).flatten(0, 1)
        if self.padding_idx is not None:
            change.masked_fill_((tokens == self.padding_idx).unsqueeze(-1), 0)
        if antithetic:
            change[len(tokens) // 2 :] *= -1
        return functional.embedding(tokens, self.weight.detach()).add_(change, alpha=sigma)

    def accumulate(
        self, noise: LayerNoise, utilities: Tensor, factor: float | Tensor, *, validate: bool
    ) -> None:
        """Add factor * sum_m utilities[m] * E_m to ``.grad`` of the parameters.

        For schemes that learn from rows only the bias is updated; :meth:`accumulate_rows` updates the weight.

        Args:
            noise: the noise that the forward used.
            utilities: [m] in the range of the parameters' dtypes, where sums of noise do not overflow.
            factor: a number or a float64 scalar; unless it is 1, it multiplies sums in at least float32.
            validate: check that sums times a factor are finite in the parameter's dtype, which synchronizes.

        Raises:
            ValueError: a gradient is not finite.
        """
        if not self.learns_from_rows:
            total = self.scheme.weighted_sum(noise.weight, utilities.to(self.weight))
            total = self._without_padding(self.join_groups(total))
            self._accumulate(self.weight, total, factor, validate=validate)
        if self.bias is not None and noise.bias is not None:
            total = torch.mv(noise.bias.flatten(1).mT, utilities.to(self.bias)).view_as(self.bias)
            self._accumulate(self.bias, total, factor, validate=validate)

    def accumulate_rows(
        self,
        noise: LayerNoise,
        utilities: Tensor,
        factor: float | Tensor,
        calls: Sequence[LayerCall],
        *,
        validate: bool,
    ) -> None:
        """Add the gradient that a scheme computes from the layer's inputs to the weight's ``.grad``.

        Args:
            noise: as for :meth:`accumulate`.
            utilities: as for :meth:`accumulate`; with antithetic sampling half the difference of the two.
            factor: as for :meth:`accumulate`.
            calls: the calls of the layer.
            validate: as for :meth:`accumulate`.

        Raises:
            ValueError: there are no calls, or a gradient is not finite.
        """
        assert isinstance(self.scheme, AbstractRowScheme)  # noqa: S101  the caller checks learns_from_rows
        if not calls:
            message = (
                f"the update of layer {self.name!r} needs its inputs: evaluate with call_with_activations(x, "
                "noise) and pass the record that it returns to update()"
            )
            raise ValueError(message)
        weight = self.split_groups(self.weight)
        for op, rows, _ in calls:
            x = op.from_batch(rows, len(utilities))
            row_utilities = utilities.to(self.weight).expand(x.shape[:2])
            total = self.scheme.node_gradient(op, weight, noise.weight, row_utilities, x)
            self._accumulate(self.weight, self.join_groups(total), factor, validate=validate)

    def dense_noise(self, noise: LayerNoise, *, update_directions: bool = False) -> dict[str, Tensor]:
        """Return E_m of the weight and of the bias as dense tensors [m, *shape], by name in the model.

        With ``update_directions``, return the tensors that the update multiplies by utilities.
        """
        write = self.scheme.update_directions if update_directions else self.scheme.dense_noise
        changes = {self.weight_path: self._without_padding(self.join_groups(write(noise.weight)))}
        return changes if noise.bias is None else {**changes, self.bias_path: noise.bias}

    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        """Return the weight of the plain layer for a member with sigma E_m = ``change``."""
        return self.join_groups(
            self.scheme.effective_weight(self.split_groups(weight), self.split_groups(change))
        )

    def _without_padding(self, values: Tensor) -> Tensor:
        """Return tensors [..., *shape] of noise with 0 for the token of padding of an Embedding."""
        if self.padding_idx is None:
            return values
        return values.index_fill(-2, torch.tensor(self.padding_idx).to(values.device), 0)

    def _accumulate(
        self, parameter: nn.Parameter, total: Tensor, factor: float | Tensor, *, validate: bool
    ) -> None:
        if isinstance(factor, Tensor) or factor != 1:
            factor = factor.to(total.device) if isinstance(factor, Tensor) else factor
            total = total.to(torch.promote_types(torch.float32, parameter.dtype)) * factor
            total = total.to(parameter.dtype)
            if validate and not all_finite(total):
                message = (
                    f"the gradient of layer {self.name!r} is not finite in {parameter.dtype}: make the "
                    "utilities smaller, for example by centered ranks"
                )
                raise ValueError(message)
        if parameter.grad is not None and parameter.grad.is_inference():  # it cannot be changed in place
            total, parameter.grad = parameter.grad + total, None
        if parameter.grad is None:
            if total.stride() != parameter.stride():  # backward() would warn when it adds to it
                total = torch.empty_like(parameter).copy_(total)
            parameter.grad = total
        else:
            parameter.grad += total


def all_finite(values: Tensor) -> bool:
    """Return whether all entries are finite, which waits for the device.

    The sum is far cheaper to read than each entry. It is not finite if an entry is not, or if it overflows.
    """
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    return math.isfinite(total) or bool(values.isfinite().all())


def _may_differentiate() -> bool:
    """Return whether a derivative of the operations that run now may be computed, or they are transformed."""
    return torch.is_grad_enabled() or _is_transformed()


def _is_transformed() -> bool:
    """Return whether operations run in torch.func.grad, jvp or vmap, or in forward-mode differentiation."""
    if forward_ad._current_level >= 0:  # noqa: SLF001  no public name
        return True
    return _are_functorch_transforms_active() and active_transforms() != {TransformType.Functionalize}


def active_transforms() -> set[TransformType]:
    """Return the transforms of torch.func in which operations run."""
    if not _are_functorch_transforms_active():
        return set()
    return {interpreter.key() for interpreter in get_interpreter_stack() or ()}


def matching_names(model: nn.Module, option: str, patterns: Iterable[str]) -> set[str]:
    """Return the names of modules and parameters that match a glob pattern, and of all modules inside them.

    Args:
        model: the model. Its own name, an empty string, matches only itself.
        option: the option of :func:`~impls.perturbation.population.perturb` that has the patterns.
        patterns: glob patterns of the names of modules and parameters.

    Raises:
        UnsupportedError: the patterns are a single string, or one matches nothing.
    """
    if isinstance(patterns, str):
        message = f"{option} must be a list of patterns, got {patterns!r}: pass [{patterns!r}]"
        raise UnsupportedError(message)
    named = [*dict(model.named_modules()), *dict(model.named_parameters(remove_duplicate=False))]
    matching: set[str] = set()
    for pattern in patterns:
        matches = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            message = f"{option}={pattern!r} matches no module and no parameter: {_suggest(pattern, named)}"
            raise UnsupportedError(message)
        matching.update(matches)
    inside = tuple(f"{name}." for name in matching if name)
    return matching | {name for name in named if name.startswith(inside)}


def trainable_modules(model: nn.Module, excluded: Container[str]) -> dict[str, nn.Module]:
    """Return the modules that directly hold trainable parameters, by name, without the excluded ones.

    Args:
        model: the model.
        excluded: names of modules, and of modules' own parameters, whose module is not excluded.

    Raises:
        UnsupportedError: a module cannot be perturbed; the message names it.
    """
    named = dict(model.named_modules())
    modules = {
        name: module
        for name, module in named.items()
        if name not in excluded
        and any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    }
    owners = {id(p): name for name, module in modules.items() for p in module.parameters(recurse=False)}
    for name in (name for name in named if name not in modules):
        for parameter in named[name].parameters(recurse=False):
            if parameter.requires_grad and id(parameter) in owners:
                message = (
                    f"{name} is excluded, but {owners[id(parameter)]} has the same parameter: "
                    "exclude both or neither"
                )
                raise UnsupportedError(message)
    for name, module in modules.items():
        for parameter, _ in module.named_parameters(name, recurse=False):
            if parameter in excluded and isinstance(module, SUPPORTED):
                message = (
                    f"exclude={parameter!r} is a parameter of a {type(module).__name__}: exclude {name!r}"
                )
                raise UnsupportedError(message)
    unsupported = {
        name: reason for name, module in modules.items() if (reason := _unsupported_reason(module))
    }
    if unsupported:
        listed = ", ".join(f"{name or 'the model itself'} ({reason})" for name, reason in unsupported.items())
        message = f"cannot perturb {listed}: pass exclude={list(unsupported)} to leave them unperturbed"
        raise UnsupportedError(message)
    return modules


def check_whole(layers: Iterable["PerturbedLayer"]) -> None:
    """Check that the parameters are whole tensors.

    Raises:
        UnsupportedError: one is a part of a tensor that is split over devices.
    """
    # Only a DTensor has this attribute. Importing that class takes as long as importing torch.
    if split := [layer.weight_path for layer in layers if hasattr(layer.weight, "placements")]:
        message = (
            f"{', '.join(split)} are split over devices, as by FSDP, and cannot be perturbed: load the whole "
            "model on each rank, and split the members with impls.shard()"
        )
        raise UnsupportedError(message)


def check_memory(model: nn.Module, layers: Iterable["PerturbedLayer"]) -> None:
    """Check that no other tensor of the model shares memory with a perturbed parameter.

    A function of the other tensor would not see the members' noise.

    Raises:
        UnsupportedError: a parameter, a buffer or an attribute does.
    """
    perturbed = {id(parameter) for layer in layers for parameter in (layer.weight, layer.bias)}
    names: dict[int, str] = {}
    ranges: dict[int, tuple[int, int]] = {}
    for name, module in model.named_modules():
        for attributes in (module._parameters, module._buffers, vars(module)):  # noqa: SLF001  all tensors
            for attribute, value in attributes.items():
                if isinstance(value, Tensor) and (addresses := memory_range(value)):
                    names[id(value)] = f"{name}.{attribute}".removeprefix(".")
                    ranges[id(value)] = addresses
    # In the order of their start, a tensor overlaps the earlier ones that end after its start.
    overlapping: list[int] = []
    for tensor in sorted(ranges, key=ranges.__getitem__):
        start, _ = ranges[tensor]
        overlapping = [earlier for earlier in overlapping if ranges[earlier][1] > start]
        for earlier in overlapping:
            if perturbed & {tensor, earlier}:
                message = (
                    f"{' and '.join(sorted((names[tensor], names[earlier])))} share memory, but are not the "
                    "same parameter: assign one parameter to both modules, or copy the values with clone()"
                )
                raise UnsupportedError(message)
        overlapping.append(tensor)


def memory_range(tensor: Tensor) -> tuple[int, int] | None:
    """Return the address of a tensor's first byte and that after its last; None if it has no memory."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _unsupported_reason(module: nn.Module) -> str:
    """Return why a module with trainable parameters cannot be perturbed, or ``""`` if it can."""
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"{name}: scripted code cannot be perturbed"
    parameters = dict(module.named_parameters(recurse=False))
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in parameters.values()):
        return f"{name}, not initialized: run the model once"
    if option := _unsupported_option(module):
        return f"{name} with {option}"
    names = _parameter_names(module)
    is_complete = all(weight in parameters for weight, _ in names)
    if isinstance(module, UNSUPPORTED) or (
        is_complete and set(parameters) - {n for pair in names for n in pair}
    ):
        return name
    if not is_complete or len({parameter.requires_grad for parameter in parameters.values()}) > 1:
        return f"{name}, where only the weight or only the bias is trainable"
    return ""


def _unsupported_option(module: nn.Module) -> str:
    """Return an option of a layer of torch with which it cannot be perturbed, or ``""``."""
    hooks = module._forward_pre_hooks.values()  # noqa: SLF001  no public name
    if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in hooks):
        options = {"a hook that computes its weight: use torch.nn.utils.parametrizations": True}
    elif is_parametrized(module) and isinstance(module, (*RECURRENT, nn.MultiheadAttention)):
        options = {"a weight that is computed from other parameters": True}
    elif isinstance(module, nn.Embedding):
        options = {
            "max_norm": module.max_norm is not None,
            "sparse": module.sparse,
            "scale_grad_by_freq": module.scale_grad_by_freq,
        }
    else:
        return ""
    return next((option for option, is_set in options.items() if is_set), "")


def _parameter_names(module: nn.Module) -> list[tuple[str, str]]:
    """Return the names of a module's weights, each with that of its bias, which the module may not have."""
    if is_parametrized(module):  # the other parameters are those of modules inside it
        return [(name, "") for name, _ in module.named_parameters(recurse=False)]
    if isinstance(module, nn.MultiheadAttention):
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if module.in_proj_weight is not None:
            others = [name for name in names if name not in {"in_proj_weight", "in_proj_bias"}]
            return [("in_proj_weight", "in_proj_bias"), *((name, "") for name in others)]
        # With kdim or vdim, three weights share a bias, which is perturbed by itself.
        return [(name, "") for name in names]
    if isinstance(module, RECURRENT):
        return [
            (name, name.replace("weight", "bias"))
            for name, _ in module.named_parameters(recurse=False)
            if name.startswith("weight")
        ]
    if not isinstance(module, SUPPORTED):
        return [(name, "") for name, _ in module.named_parameters(recurse=False)]
    return [("weight", "bias")]


@functools.lru_cache(2**12)  # drawing on the meta device takes milliseconds
def _find_misfit(scheme: AnyScheme, shape: torch.Size, dtype: torch.dtype) -> str:
    """Return which option of a scheme does not fit a weight [g, o, i, *taps], or ``""``.

    Raises:
        RuntimeError: the scheme draws noise on the CPU, but cannot make its shapes on the meta device.
    """

    def draw(device: str) -> None:
        weight = torch.ones(shape, dtype=dtype, device=device)
        stream = STREAMS[scheme.stream](0, 0, "weight", range(1), weight.device, dtype)
        scheme.prepare(scheme.sample(weight, stream), weight, 1.0)

    try:
        draw("meta")
    except UnsupportedError as error:
        return str(error)
    except Exception as error:  # a scheme may raise anything
        draw("cpu")  # raises the same error unless it is due to the meta device
        message = (
            f"{scheme}: sample() fails on the meta device, where it is tried first without values "
            f"({type(error).__name__}: {error}). Draw from the stream, as by "
            "stream.normal(name, *shape), not from a torch.Generator, and read no values of the weight"
        )
        raise RuntimeError(message) from error
    return ""


def _suggest(pattern: str, names: Iterable[str]) -> str:
    """Return a hint for a pattern that matches no name: the closest names, and how to list all."""
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    return f"closest are {', '.join(close)}; list all with dict(model.named_modules())"


def perturbed_layers(
    modules: Mapping[str, nn.Module], patterns: Mapping[str, AnyScheme], excluded: Container[str] = ()
) -> list[PerturbedLayer]:
    """Pair each module with the scheme of the first glob pattern that matches its name.

    Modules that share weight and bias make one layer with the name of the first. ``excluded`` are names of
    modules' own parameters that are left out.

    Raises:
        UnsupportedError: no pattern matches a module's name, or a pattern matches none.
    """
    layers: dict[int, PerturbedLayer] = {}
    unmatched, used = [], set()
    for name, module in modules.items():
        pattern = next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        if pattern is None and not (patterns and isinstance(module, NORMALIZATIONS)):
            unmatched.append(name or "the model itself")
            continue
        used.add(pattern)
        # A normalization has noise without a scheme, so any scheme serves where no pattern matches it.
        scheme = next(iter(patterns.values())) if pattern is None else patterns[pattern]
        for layer in PerturbedLayer.all_of(name, module, scheme):
            if layer.weight_path in excluded:
                continue
            first = layers.setdefault(id(layer.weight), layer)
            if first.padding_idx != layer.padding_idx:
                message = (
                    f"{first.name} and {layer.name} share a weight, but not a padding_idx: leave it out, or "
                    "exclude both"
                )
                raise UnsupportedError(message)
            if first.bias is not layer.bias:
                message = (
                    f"{first.name} and {layer.name} share a weight but not their bias: share the bias too, "
                    "use no bias, or exclude both"
                )
                raise UnsupportedError(message)
    if unmatched:
        message = (
            f"no pattern matches the layers {', '.join(unmatched)}: "
            "add a pattern ('*' for all others) or exclude them"
        )
        raise UnsupportedError(message)
    if unused := [pattern for pattern in patterns if pattern not in used]:
        message = f"the scheme's pattern {unused[0]!r} matches no layer: {_suggest(unused[0], modules)}"
        raise UnsupportedError(message)
    return list(layers.values())


def with_sigmas(layers: Iterable[PerturbedLayer], sigmas: Mapping[str, float]) -> list[PerturbedLayer]:
    """Return the layers with the sigma of the first glob pattern that matches them, relative to the last one.

    A pattern matches the name of the module or of the weight.

    Raises:
        UnsupportedError: no pattern matches a layer, or a pattern matches none.
    """
    found: list[PerturbedLayer] = []
    names: list[str] = []
    used = set()
    for layer in layers:
        own = layer.module_name, layer.weight_path
        pattern = next((p for p in sigmas if any(fnmatch.fnmatchcase(name, p) for name in own)), None)
        if pattern is None:
            message = f"no pattern of sigma matches layer {layer.name!r}: add a pattern ('*' for all others)"
            raise UnsupportedError(message)
        names += own
        used.add(pattern)
        found.append(dataclasses.replace(layer, sigma_ratio=sigmas[pattern] / [*sigmas.values()][-1]))
    if unused := [pattern for pattern in sigmas if pattern not in used]:
        message = f"the pattern {unused[0]!r} of sigma matches no layer: {_suggest(unused[0], names)}"
        raise UnsupportedError(message)
    return found
