"""One layer of a model with its scheme: what is drawn for it, applied in it and summed for it.

Sigma, bias and its noise and the antithetic halves exist here, once for all schemes.
"""

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from impls.binary.layers import AbstractBinarized
from impls.perturbation.noise import STREAMS, Noise, NoiseStream
from impls.perturbation.operators import AbstractOperator
from impls.perturbation.scheme import AbstractRowScheme, AnyScheme, TensorRef
from impls.schemes.binary import AbstractBitScheme
from impls.schemes.dense import Perturbed

NORMALISATIONS = (
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
"""Modules whose scale and shift are perturbed, by dense noise, whatever the scheme."""

SUPPORTED = (nn.Linear, nn.Conv2d, AbstractBinarized, *NORMALISATIONS)


@dataclass(frozen=True, eq=False)
class LayerNoise:
    """The noise of one layer: the scheme's for the weight, dense [m, *bias] for the bias."""

    weight: Noise
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes that the noise holds."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def narrow(self, start: int, stop: int) -> "LayerNoise":
        """Return the noise of members ``start`` to ``stop``, counted from the first one here."""
        return LayerNoise(
            self.weight.narrow(start, stop), None if self.bias is None else self.bias[start:stop]
        )


class LayerCall(NamedTuple):
    """One call of a layer: the operator it was called with, and its rows [repeats * members, ...].

    ``version`` is torch's count of the changes that were made to the rows in place.
    """

    operator: AbstractOperator
    rows: Tensor
    version: int

    @classmethod
    def of(cls, operator: AbstractOperator, rows: Tensor) -> "LayerCall":
        """Take a call as it is made; nothing is copied."""
        return cls(operator, rows, 0 if rows.is_inference() else rows._version)  # noqa: SLF001  torch's own name for it


@dataclass(frozen=True, eq=False)
class PerturbedLayer:
    """A layer's parameters and the scheme that perturbs them.

    Attributes:
        name: the module's name in its model.
        weight: the parameter, in torch's shape.
        bias: the parameter, if the layer has one.
        scheme: how the weight is perturbed.
        groups: of a grouped convolution; None where the weight is a vector of scales.
        module: where the parameters were found.

    """

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    scheme: AnyScheme
    groups: int | None
    module: nn.Module

    @classmethod
    def of(cls, name: str, module: nn.Module, scheme: AnyScheme) -> "PerturbedLayer":
        """Read a supported module's parameters.

        Raises:
            ValueError: an option of the scheme does not fit the weight, or the scheme not the layer.

        """
        is_affine = isinstance(module, NORMALISATIONS)
        groups = None if is_affine else getattr(module, "groups", 1)
        own: AnyScheme = Perturbed() if is_affine else scheme
        if isinstance(module, AbstractBinarized) != isinstance(own, AbstractBitScheme):
            message = (
                f"{name or type(module).__name__}: {scheme} does not serve {type(module).__name__}. Layers "
                "of bits, such as BinarizedLinear, take schemes of bits, such as Binary(), and others do not"
            )
            raise ValueError(message)
        if reason := own.supports(module):
            message = f"{name or type(module).__name__}: {own}: {reason}"
            raise ValueError(message)
        parameters = dict(module.named_parameters(recurse=False))
        layer = cls(name, parameters["weight"], parameters.get("bias"), own, groups, module)
        try:
            layer.sample(0, 0, range(1), device="meta")
        except ValueError as error:
            message = f"{name or type(module).__name__}: {error}"
            raise ValueError(message) from None
        return layer

    def check_parameters(self) -> None:
        """Hold the module to the parameters it had.

        Raises:
            ValueError: one was replaced by another object.

        """
        if self.module.weight is not self.weight or getattr(self.module, "bias", None) is not self.bias:
            message = f"a parameter of layer {self.name!r} was replaced by another: call perturb() again"
            raise ValueError(message)

    def check_noise(self, noise: LayerNoise) -> None:
        """Hold noise that is a multiple of the weight to the weight's own memory.

        Raises:
            ValueError: the parameter's data is another tensor by now.

        """
        borrowed = (value for value in vars(noise.weight).values() if isinstance(value, TensorRef))
        if any(value.tensor.data_ptr() != self.weight.data_ptr() for value in borrowed):
            message = f"the data of layer {self.name!r} was replaced since its noise was drawn: sample again"
            raise ValueError(message)

    def grouped(self, weight: Tensor) -> Tensor:
        """View a tensor of the weight's shape as [g, o, i, *taps]; a vector of scales stays as it is."""
        return weight if self.groups is None else weight.unflatten(0, (self.groups, -1))

    @property
    def learns_from_rows(self) -> bool:
        """Whether the weight's update needs the rows that the layer saw."""
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
    ) -> LayerNoise:
        """Draw the noise of these members, by default from what the scheme needs; on ``meta`` only shapes."""
        stream = STREAMS[self.scheme.stream] if stream is None else stream
        weight = self.grouped(self.weight.detach()).to(device)
        place, dtype = weight.device, weight.dtype
        draws = stream(seed, step, f"{self.name}.weight", members, place, dtype)
        noise = self.scheme.prepare(self.scheme.sample(weight, draws), weight, sigma)
        if self.bias is None:
            return LayerNoise(noise, None)
        draws = stream(seed, step, f"{self.name}.bias", members, place, self.bias.dtype)
        return LayerNoise(noise, draws.normal("dense", *self.bias.shape))

    def forward(  # noqa: PLR0913  a context and what it is applied to
        self,
        op: AbstractOperator,
        rows: Tensor,
        noise: LayerNoise,
        members: int,
        sigma: float,
        *,
        antithetic: bool,
    ) -> Tensor:
        """Apply each member's own weight and bias to its rows, [repeats * members, ...]."""
        x = op.split(rows, members)
        half = x.shape[0] // 2 if antithetic else x.shape[0]
        scale: float | Tensor = sigma
        if antithetic:
            scale = x.new_full((x.shape[0],), sigma).view(-1, *[1] * (x.dim() - 1))
            scale[half:] *= -1
        y = self.scheme.forward(op, self.grouped(self.weight), noise.weight, x, scale)
        if not isinstance(y, Tensor):
            message = f"{self.scheme}: forward returned {type(y).__name__} instead of a tensor"
            raise TypeError(message)
        if self.bias is not None and noise.bias is not None:
            shift, change = op.bias(self.bias.unsqueeze(0), y), op.bias(noise.bias, y)
            y[:half] += torch.add(shift, change, alpha=sigma)
            if antithetic:
                y[half:] += torch.sub(shift, change, alpha=sigma)
        return op.join(y, rows)

    def accumulate(
        self, noise: LayerNoise, utilities: Tensor, factor: Tensor, *, validate: bool = False
    ) -> None:
        """Add -factor * sum_m utilities[m] * E_m to the parameters' ``.grad``, where that is the update.

        Args:
            noise: the noise that the forward used.
            utilities: [m], scaled so that any float type holds them.
            factor: a scalar in float64, applied in the widest type at hand.
            validate: see that the sums fit the parameters' type, which waits for the device.

        Raises:
            ValueError: they do not.

        """
        if not self.learns_from_rows:
            total = self.scheme.weighted_sum(noise.weight, utilities.to(self.weight))
            self._accumulate(self.weight, total.reshape(self.weight.shape), factor, validate=validate)
        if self.bias is not None and noise.bias is not None:
            total = torch.tensordot(utilities.to(self.bias), noise.bias, dims=1)
            self._accumulate(self.bias, total, factor, validate=validate)

    def accumulate_rows(
        self,
        noise: LayerNoise,
        utilities: Tensor,
        factor: Tensor,
        calls: Iterable[tuple[AbstractOperator, Tensor, int]],
        *,
        validate: bool = False,
    ) -> None:
        """Add the rows' estimates to the weight's ``.grad``, for a scheme that learns from rows.

        Args:
            noise: the noise that the forward used.
            utilities: [m], scaled so that any float type holds them. With antithetic sampling half the
                difference of a member's two: what both have in common says nothing of its noise.
            factor: a scalar in float64, applied in the widest type at hand.
            calls: each operator that the layer was called with, and the rows it got.
            validate: as for :meth:`accumulate`.

        Raises:
            ValueError: nothing was recorded, or the sum does not fit the weight's type.

        """
        assert isinstance(self.scheme, AbstractRowScheme)  # noqa: S101  the caller has asked
        weight, recorded = self.grouped(self.weight), False
        for op, rows, _ in calls:
            x = op.split(rows, len(utilities))
            each = utilities.to(self.weight).expand(x.shape[:2])
            total = self.scheme.node_gradient(op, weight, noise.weight, each, x)
            self._accumulate(self.weight, total.reshape(self.weight.shape), factor, validate=validate)
            recorded = True
        if not recorded:
            message = (
                f"layer {self.name!r} learns from the rows it saw: evaluate with recorded(x, noise) and pass "
                "its record to update()"
            )
            raise ValueError(message)

    def dense_noise(self, noise: LayerNoise, *, update_directions: bool = False) -> dict[str, Tensor]:
        """Write out every member's E_m in torch's shapes, [m, *shape] by parameter name: the slow truth.

        With ``directions`` what the update sums, times utilities: nearly always the same.
        """
        write = self.scheme.update_directions if update_directions else self.scheme.dense_noise
        written = write(noise.weight)
        changes = {"weight": written.reshape(-1, *self.weight.shape)}
        return changes if noise.bias is None else {**changes, "bias": noise.bias}

    def effective_weight(self, weight: Tensor, change: Tensor) -> Tensor:
        """Return a member's weight in torch's shape, from its noise, as the plain layer reads it."""
        return self.scheme.effective_weight(self.grouped(weight), self.grouped(change)).reshape(weight.shape)

    def _accumulate(self, parameter: nn.Parameter, total: Tensor, factor: Tensor, *, validate: bool) -> None:
        wide = torch.promote_types(torch.float32, parameter.dtype)
        gradient = (total.to(wide) * -factor.to(total.device, wide)).to(parameter.dtype)
        if validate and not bool(gradient.isfinite().all()):
            message = (
                f"the gradient of layer {self.name!r} does not fit {parameter.dtype}: shape the utilities "
                "first, by their ranks for instance, and keep them about their mean"
            )
            raise ValueError(message)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def write_dense_noise(
    layers: Iterable[PerturbedLayer], noise: Mapping[str, LayerNoise], *, update_directions: bool
) -> dict[str, Tensor]:
    """Write out what :meth:`PerturbedLayer.dense_noise` does of every layer, by whole names."""
    return {
        f"{layer.name}.{name}".removeprefix("."): changes
        for layer in layers
        for name, changes in layer.dense_noise(noise[layer.name], update_directions=update_directions).items()
    }


def effective_weights(
    layers: Iterable[PerturbedLayer], plain: Mapping[str, Tensor], changes: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return what parameters are for a member whose noise is sigma E_m = ``changes``, by whole names."""
    found = {name: plain[name] + change for name, change in changes.items()}
    for layer in layers:
        name = f"{layer.name}.weight".removeprefix(".")
        if name in changes:
            found[name] = layer.effective_weight(plain[name], changes[name])
    return found


def trainable_modules(model: nn.Module, exclude: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return modules with trainable parameters of their own that are not excluded, by name.

    Raises:
        ValueError: a pattern matches nothing, or a module cannot be perturbed; the message names it.

    """
    named = dict(model.named_modules())
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in named):
            message = (
                f"exclude pattern {pattern!r} matches no module; there are: {', '.join(filter(None, named))}"
            )
            raise ValueError(message)
    modules = {
        name: module
        for name, module in named.items()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
    }
    chosen = {id(p): name for name, module in modules.items() for p in module.parameters(recurse=False)}
    for name in (name for name in named if name not in modules):
        for parameter in named[name].parameters(recurse=False):
            if parameter.requires_grad and id(parameter) in chosen:
                message = (
                    f"{name} is excluded but shares a parameter with {chosen[id(parameter)]}, which is not: "
                    "exclude both or neither"
                )
                raise ValueError(message)
    refused = [
        f"{name or 'the model itself'} ({why})" for name, m in modules.items() if (why := _obstacle(m))
    ]
    if refused:
        message = (
            f"cannot perturb {', '.join(refused)}: exclude them by name (exclude=[...]) to leave "
            "them unperturbed"
        )
        raise ValueError(message)
    return modules


def _obstacle(module: nn.Module) -> str:
    """Say why a module with trainable parameters cannot be perturbed, or nothing."""
    kind = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        return f"{kind}: scripted code cannot be perturbed"
    own = dict(module.named_parameters(recurse=False))
    if not isinstance(module, SUPPORTED) or set(own) - {"weight", "bias"}:
        return kind
    if isinstance(own.get("weight"), nn.UninitializedParameter):
        return f"{kind}, not initialised: run the model once"
    if "weight" not in own or len({parameter.requires_grad for parameter in own.values()}) > 1:
        return f"{kind} with only a part of weight and bias trainable"
    return ""


def perturbed_layers(
    modules: Mapping[str, nn.Module], patterns: Mapping[str, AnyScheme]
) -> list[PerturbedLayer]:
    """Give each module the scheme of the first pattern that matches its name.

    Raises:
        ValueError: a layer has no scheme, or a pattern no layer; the message names them.

    """
    chosen: dict[int, PerturbedLayer] = {}
    unmatched, used = [], set()
    for name, module in modules.items():
        pattern = next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        if pattern is None and not isinstance(module, NORMALISATIONS):
            unmatched.append(name)
            continue
        used.add(pattern)
        scheme = next(iter(patterns.values())) if pattern is None else patterns[pattern]
        layer = PerturbedLayer.of(name, module, scheme)
        # Layers that share weight and bias are one layer: the first name counts.
        first = chosen.setdefault(id(layer.weight), layer)
        if first.bias is not layer.bias:
            message = (
                f"{first.name} and {name} share a weight but not their bias, which no scheme can serve: "
                "share the bias too, do without, or exclude both"
            )
            raise ValueError(message)
    if unmatched:
        message = f"no scheme for {', '.join(unmatched)}: add a pattern ('*' for the rest) or exclude them"
        raise ValueError(message)
    if unused := [pattern for pattern in patterns if pattern not in used]:
        message = f"pattern {unused[0]!r} matches no layer; there are: {', '.join(modules)}"
        raise ValueError(message)
    return list(chosen.values())
