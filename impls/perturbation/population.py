"""A population of perturbed copies of a model.

population = perturb(model, Permuted(in_sparsity=0.5), members=256, sigma=0.02, seed=0)
noise = population.sample(step)
rewards = fitness(population(x, noise))
population.update(noise, utilities)
optimizer.step()
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from impls.perturbation.function_mode import MemberFunctionMode
from impls.perturbation.layer import (
    LayerCall,
    LayerNoise,
    PerturbedLayer,
    perturbed_layers,
    trainable_modules,
)
from impls.perturbation.noise import (
    STREAMS,
    NoiseStream,
    PhiloxStream,
    check_layer_names,
    keys_of_step,
    to_nonnegative_int,
)
from impls.perturbation.scheme import AbstractScheme, AnyScheme, check_count


@dataclass(frozen=True, eq=False)
class PopulationNoise:
    """Noise of one step for a range of members.

    Attributes:
        members: the members that the noise is for.
        layers: noise of each layer, by name.
        owner: the population that drew it, the only one that accepts it.

    """

    members: range
    layers: Mapping[str, LayerNoise]
    owner: "Population"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(noise.nbytes for noise in self.layers.values())


@dataclass(frozen=True, eq=False)
class ActivationRecord:
    """Inputs of the layers whose update needs them.

    Attributes:
        layers: the calls of each such layer, by name; empty where no scheme learns from rows.
        noise: the noise that the model ran with.

    """

    layers: Mapping[str, Sequence[LayerCall]]
    noise: PopulationNoise

    @property
    def nbytes(self) -> int:
        """Memory of the activations that the record keeps alive, in bytes."""
        return sum(call.rows.nbytes for calls in self.layers.values() for call in calls)

    def check(self, noise: PopulationNoise) -> None:
        """Check that the record belongs to a step's noise, and that its activations are unchanged.

        Raises:
            ValueError: the record is of other noise, or activations were changed in place.

        """
        if self.noise is not noise:
            message = (
                "this record was made with other noise: pass the one that call_with_activations() returned "
                "with it"
            )
            raise ValueError(message)
        for name, calls in self.layers.items():
            if any(call.version != LayerCall.of(call.operator, call.rows).version for call in calls):
                message = (
                    f"inputs of layer {name!r} were changed in place since its call: its update needs them. "
                    "Write y = y + x instead of y += x, or give each call its own inputs"
                )
                raise ValueError(message)


class Population:
    """Members that each see the model's weights plus sigma times their own noise.

    The model is left unchanged: its parameters, ``state_dict`` and ``model(x)`` are the plain ones. Make one
    with :func:`perturb`.

    Attributes:
        model: the plain model.
        layers: the perturbed layers with their schemes.
        members: number of members.
        sigma: scale of the noise.
        antithetic: whether each member is evaluated with its noise and with its negative.
        seed: seed of all noise.

    """

    def __init__(  # noqa: PLR0913  perturb() is the interface, and checks them
        self,
        model: nn.Module,
        layers: Iterable[PerturbedLayer],
        *,
        members: int,
        sigma: float,
        antithetic: bool,
        seed: int,
        stream: type[NoiseStream],
    ) -> None:
        """Store arguments that :func:`perturb` has checked."""
        self._stream = stream
        self.members, self.sigma, self.antithetic, self.seed = members, sigma, antithetic, seed
        self.model, self.layers = model, tuple(layers)

    @property
    def shard_multiple(self) -> int:
        """The population may be split at multiples of this number; the last part may be shorter."""
        return math.lcm(self._stream.SHARD_MULTIPLE, *(layer.scheme.shard_multiple for layer in self.layers))

    @torch.no_grad()
    def sample(self, step: int | Tensor, members: range | None = None) -> PopulationNoise:
        """Draw the noise of a step.

        It is a function of the seed, the step, the layer and the member. To draw new noise at each replay of
        a CUDA graph, use ``stream="philox"`` and capture ``sample(step); step.add_(1)`` with the step as a
        tensor.

        Args:
            step: the training step, an integer of at least 0; or the same number as a 0-d int64 tensor on the
                layers' device, whose value is not checked.
            members: a part of the population, to evaluate it in several calls; it starts at a multiple of
                :attr:`shard_multiple` and ends at one or at the last member. By default all members.

        Raises:
            ValueError: the step or the part is invalid.
            RuntimeError: a CUDA graph is being captured with a step that it would repeat at every replay.

        """
        step = self._step(step)
        part = range(self.members) if members is None else members
        check_shard(part, self.members, self.shard_multiple)
        return PopulationNoise(
            part,
            {
                layer.name: layer.sample(self.seed, step, part, sigma=self.sigma, stream=self._stream)
                for layer in self.layers
            },
            self,
        )

    def _step(self, step: int | Tensor) -> int | Tensor:
        """Return a step in the form that streams accept: an int, or keys on the device."""
        device = self.layers[0].weight.device
        if isinstance(step, Tensor) and (step.is_cuda or issubclass(self._stream, PhiloxStream)):
            return keys_of_step(self._stream, self.seed, step, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            message = (
                f"a CUDA graph would draw the same noise, of step {step}, at every replay: "
                f"use stream='philox', pass the step as a 0-d int64 tensor on {device}, "
                "and increment it inside the capture"
            )
            raise RuntimeError(message)
        return to_nonnegative_int("step", step)

    @torch.no_grad()
    def __call__(self, x: Tensor, noise: PopulationNoise) -> Any:  # noqa: ANN401  the model's output
        """Run the model on rows [repeats * members, ...] with row = repeat * members + member.

        With antithetic sampling, the second half of the repeats sees the negated noise.

        Raises:
            ValueError: the number of rows is not a multiple of the noise's members; the number of repeats is
                odd with antithetic sampling; or the model uses a perturbed parameter in an unsupported way.

        """
        return self.call_with_activations(x, noise)[0]

    @torch.no_grad()
    def call_with_activations(self, x: Tensor, noise: PopulationNoise) -> tuple[Any, ActivationRecord]:
        """Run the model, and return its output with the activations that the update needs.

        Only schemes that learn from rows need the record; it is empty for others. The forward is not traced
        by ``torch.compile``: it runs eagerly inside compiled code.

        Raises:
            ValueError: as for a call.

        """
        if torch.compiler.is_compiling():
            # The decorator would load the compiler and add overhead to every eager call.
            return torch.compiler.disable(self.call_with_activations)(x, noise)
        self._check_noise(noise)
        members = len(noise.members)
        rows = check_rows(x, members, antithetic=self.antithetic)
        options: dict[str, Any] = {"sigma": self.sigma, "antithetic": self.antithetic}
        context = MemberFunctionMode(self.layers, noise.layers, rows=rows, members=members, **options)
        model = self.model
        with context:
            y = model(x)
        context.check_layers_used(type(model).__name__)
        return y, ActivationRecord(context.calls, noise)

    @torch.no_grad()
    def update(
        self,
        noise: PopulationNoise,
        utilities: Tensor,
        record: ActivationRecord | None = None,
        *,
        validate: bool = True,
    ) -> None:
        """Accumulate the gradient estimate into ``.grad`` of the perturbed parameters.

        The estimate is -1 / (n sigma) * sum_m c_m E_m, with n the evaluations of the whole population, so
        that ``optimizer.step()`` increases the utilities. The updates of all parts of a population add up to
        that of the whole.

        Args:
            noise: the noise that the rewards were measured with.
            utilities: c, one number for each member of ``noise``, on any device. With antithetic sampling
                two for each: first those of all members with their noise, then with its negative.
            record: the second result of :meth:`call_with_activations`, for schemes that learn from rows.
            validate: check that utilities and gradients are finite, which synchronizes with the device;
                without it NaN is accumulated.

        Raises:
            ValueError: utilities have another length or are not finite, a scheme lacks its record, or a
                gradient does not fit its parameter's type; earlier layers have been updated by then.

        """
        self._check_noise(noise)
        members, sides = len(noise.members), 2 if self.antithetic else 1
        device = self.layers[0].weight.device
        c = combine_antithetic(utilities, members, device, antithetic=self.antithetic, validate=validate)
        if record is not None:
            record.check(noise)
        size = norm(c)
        evaluations = self.members * sides
        for layer in self.layers:
            drawn = noise.layers[layer.name]
            layer.accumulate(drawn, c / size, size / (evaluations * self.sigma), validate=validate)
            if layer.learns_from_rows:
                calls = () if record is None else record.layers.get(layer.name, ())
                half = c / size / sides
                layer.accumulate_rows(drawn, half, size / evaluations, calls, validate=validate)

    @torch.no_grad()
    def member(self, noise: PopulationNoise, member: int, *, negated: bool = False) -> dict[str, Tensor]:
        """Return one member's effective weights as ``state_dict`` entries.

        ``model.load_state_dict(population.member(noise, best), strict=False)`` keeps that member.
        """
        sigma = -self.sigma if negated else self.sigma
        plain = dict(self.model.named_parameters(remove_duplicate=False))
        changes = {name: sigma * change for name, change in self.perturbation(noise, member).items()}
        return self.effective_weights({name: plain[name].detach() for name in changes}, changes)

    def effective_weights(
        self, plain: Mapping[str, Tensor], changes: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the parameters of a member with noise sigma E_m = ``changes``, by name."""
        weights = {name: plain[name] + change for name, change in changes.items()}
        for layer in self.layers:
            name = f"{layer.name}.weight".removeprefix(".")
            if name in changes:
                weights[name] = layer.effective_weight(plain[name], changes[name])
        return weights

    @torch.no_grad()
    def perturbation(self, noise: PopulationNoise, member: int) -> dict[str, Tensor]:
        """Return one member's E_m as dense tensors, by parameter name.

        Raises:
            IndexError: the noise has no such member.

        """
        if not 0 <= member < (count := len(noise.members)):
            message = f"member {member} is not among the {count} of this noise"
            raise IndexError(message)
        return {name: changes[0] for name, changes in self.dense_noise(noise, member, member + 1).items()}

    @torch.no_grad()
    def dense_noise(
        self, noise: PopulationNoise, start: int = 0, stop: int = -1, *, update_directions: bool = False
    ) -> dict[str, Tensor]:
        """Return E_m of members ``start`` to ``stop`` as dense tensors [m, *shape], by parameter name.

        Args:
            noise: the noise.
            start: the first member, counted from the first one of the noise.
            stop: the member after the last one; by default all members.
            update_directions: return the tensors that the update multiplies by utilities instead; they are
                E_m for most schemes.

        """
        stop = stop if stop >= 0 else len(noise.members)
        return {
            f"{layer.name}.{name}".removeprefix("."): changes
            for layer in self.layers
            for name, changes in layer.dense_noise(
                noise.layers[layer.name].narrow(start, stop), update_directions=update_directions
            ).items()
        }

    def _check_noise(self, noise: PopulationNoise) -> None:
        if noise.owner is not self:
            message = "this noise was drawn by another population: call this one's sample()"
            raise ValueError(message)
        for layer in self.layers:
            layer.check_parameters()
            layer.check_noise(noise.layers[layer.name])

    @property
    def noise_bytes(self) -> int:
        """Memory of one step's noise for the whole population, in bytes; no noise is drawn."""
        everyone, stream = range(self.members), self._stream
        shapes = (layer.sample(0, 0, everyone, device="meta", stream=stream) for layer in self.layers)
        return sum(noise.nbytes for noise in shapes)


def perturb(  # noqa: PLR0913  each is an independent option
    model: nn.Module,
    scheme: AnyScheme | Mapping[str, AnyScheme],
    *,
    members: int,
    sigma: float,
    antithetic: bool = False,
    seed: int = 0,
    exclude: Iterable[str] = (),
    stream: str | None = None,
) -> Population:
    """Make a population of perturbed copies of a model.

    Weights of Linear and Conv2d layers are perturbed by the scheme; biases, and scales and shifts of
    normalization layers, by dense noise. Parameters with ``requires_grad=False`` are not perturbed.

    Args:
        model: any module built of supported layers.
        scheme: one for all layers, or a mapping from glob patterns of layer names (``"encoder.*"``) to
            schemes; the first pattern that matches a layer decides.
        members: number of copies.
        sigma: scale of the noise, above 0.
        antithetic: evaluate each member with its noise and with its negative.
        seed: seed of all noise; no global generator is used.
        exclude: glob patterns of modules that are not perturbed.
        stream: source of the noise: ``block``, torch's generators, or ``philox``, a counter-based generator
            with the same bits in kernels, for any split of the population. By default ``philox`` if a scheme
            draws its noise inside a kernel, else ``block``.

    Raises:
        ValueError: a number is out of range, a pattern matches nothing, or the model has parameters that
            cannot be perturbed; the message names them.

    """
    check_count("members", members)
    seed = to_nonnegative_int("seed", seed)
    if not (isinstance(sigma, int | float) and 0 < sigma < math.inf):
        message = f"sigma must be a number above 0, got {sigma!r}"
        raise ValueError(message)
    patterns = schemes_by_pattern(scheme)
    stream = stream_for(patterns.values(), stream)
    modules = trainable_modules(model, tuple(exclude))
    layers = perturbed_layers(modules, patterns)
    if not layers:
        message = f"nothing to perturb: {type(model).__name__} has no trainable parameters left"
        raise ValueError(message)
    check_layer_names(
        STREAMS[stream], (f"{layer.name}.{kind}" for layer in layers for kind in ("weight", "bias"))
    )
    for layer in layers:
        if antithetic and not layer.scheme.supports_antithetic:
            message = (
                f"{layer.scheme} does not support antithetic sampling: weights of {layer.name!r} are binary"
            )
            raise ValueError(message)
    return Population(
        model,
        layers,
        members=members,
        sigma=sigma,
        antithetic=antithetic,
        seed=seed,
        stream=STREAMS[stream],
    )


def schemes_by_pattern(scheme: AnyScheme | Mapping[str, AnyScheme]) -> dict[str, AnyScheme]:
    """Return schemes by name pattern; a single scheme matches all layers.

    Raises:
        ValueError: a value is not a scheme.

    """
    patterns = dict(scheme) if isinstance(scheme, Mapping) else {"*": scheme}
    for pattern, value in patterns.items():
        if not isinstance(value, AbstractScheme):
            message = f"the scheme for {pattern!r} must be an instance such as Permuted(), got {value!r}"
            raise ValueError(message)  # noqa: TRY004  as for every bad argument
    return patterns


def stream_for(schemes: Iterable[AnyScheme], name: str | None = None) -> str:
    """Return the name of a stream that all schemes support: ``philox`` if one of them needs it.

    Raises:
        ValueError: the named stream does not exist, or a scheme cannot draw from it.

    """
    fused = next((scheme for scheme in schemes if scheme.stream == "philox"), None)
    if name is None:
        return "philox" if fused else "block"
    if name not in STREAMS:
        message = f"no stream {name!r}; available: {', '.join(STREAMS)}"
        raise ValueError(message)
    if fused and name != "philox":
        message = (
            f"{fused} draws its noise inside a kernel, from the stream philox: leave stream out or set it to "
            f"'philox', got {name!r}"
        )
        raise ValueError(message)
    return name


def combine_antithetic(
    utilities: Tensor, members: int, device: torch.device, *, antithetic: bool, validate: bool
) -> Tensor:
    """Return one float64 number for each member: its utility, or the difference of its antithetic two.

    Raises:
        ValueError: there are too few or too many, or with ``validate`` some are not finite.

    """
    c = torch.as_tensor(utilities, device=device).detach().flatten().double()
    if c.numel() != members * (2 if antithetic else 1):
        message = f"{c.numel()} utilities for {members} members" + " twice (antithetic)" * antithetic
        raise ValueError(message)
    if validate and not bool(c.isfinite().all()):
        message = f"{int((~c.isfinite()).sum())} of {c.numel()} utilities are not finite"
        raise ValueError(message)
    return c[:members] - c[members:] if antithetic else c


def norm(c: Tensor) -> Tensor:
    """Return the Euclidean norm of utilities in float64, but at least 1.

    Utilities divided by it fit the narrowest float type. The square of the norm may overflow float64.
    """
    largest = c.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return largest * (c / largest).norm().clamp_min(1.0)


def check_shard(part: range, members: int, multiple: int) -> None:
    """Check that a range of members is a valid part of a population.

    Raises:
        ValueError: it is empty, beyond the population, or does not start and end at a multiple.

    """
    ends_well = part.stop % multiple == 0 or part.stop == members
    inside = part and part.step == 1 and part.start >= 0 and part.stop <= members
    if not (inside and part.start % multiple == 0 and ends_well):
        message = (
            f"members {part} is not a valid part of the population: parts of 0..{members} start and end "
            f"at multiples of {multiple} (or at the end)"
        )
        raise ValueError(message)


def check_rows(x: Tensor, members: int, *, antithetic: bool) -> int:
    """Return the number of rows of an input [repeats * members, ...].

    Raises:
        ValueError: it is not a multiple of the members, or the repeats are odd with antithetic sampling.

    """
    if x.dim() == 0:
        message = "the input has no rows: expected [repeats * members, ...]"
        raise ValueError(message)
    rows = x.shape[0]
    if rows == 0 or rows % members:
        message = (
            f"a batch of {rows} rows is not a multiple of {members} members (row = repeat * members + member)"
        )
        raise ValueError(message)
    if antithetic and rows // members % 2:
        message = (
            f"antithetic sampling needs an even number of repeats, got {rows // members} "
            f"({rows} rows, {members} members)"
        )
        raise ValueError(message)
    return rows
