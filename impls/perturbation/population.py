"""What a person trains with: a population of perturbed copies of any model.

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
    effective_weights,
    perturbed_layers,
    trainable_modules,
    write_dense_noise,
)
from impls.perturbation.noise import (
    STREAMS,
    NoiseStream,
    PhiloxStream,
    check_layers,
    step_on_device,
    whole_number,
)
from impls.perturbation.scheme import AbstractScheme, AnyScheme, check_count


@dataclass(frozen=True, eq=False)
class PopulationNoise:
    """The noise of one step for a range of members, by layer: a value, kept by the caller."""

    members: range
    layers: Mapping[str, LayerNoise]
    owner: object
    """Whose noise it is: a population takes only its own."""

    @property
    def nbytes(self) -> int:
        """Bytes that the noise holds."""
        return sum(noise.nbytes for noise in self.layers.values())


@dataclass(frozen=True, eq=False)
class ActivationRecord:
    """What the layers saw that learn from rows, by name, call after call; empty where none does."""

    layers: Mapping[str, Sequence[LayerCall]]
    noise: PopulationNoise
    """The noise that they saw it with."""

    @property
    def nbytes(self) -> int:
        """Bytes that the record keeps alive."""
        return sum(seen.rows.nbytes for calls in self.layers.values() for seen in calls)

    def check(self, noise: PopulationNoise) -> None:
        """Hold the record to the noise that is to be summed, and its rows to what the layers saw.

        Raises:
            ValueError: it is of other noise, or its rows were changed in place since.

        """
        if self.noise is not noise:
            message = (
                "this record was made with other noise: pass the one that call_with_activations() returned "
                "with it"
            )
            raise ValueError(message)
        for name, calls in self.layers.items():
            if any(seen.version != LayerCall.of(*seen[:2]).version for seen in calls):
                message = (
                    f"the rows that layer {name!r} saw were changed in place since: its update needs them. "
                    "Write y = y + x instead of y += x, or give each call inputs of its own"
                )
                raise ValueError(message)


class Population:
    """Members that each see the model's weights plus sigma times their own noise.

    The model stays as it is: its parameters, ``state_dict`` and ``model(x)`` are the plain ones.
    Made by :func:`perturb`.
    """

    def __init__(  # noqa: PLR0913  # people call perturb(), which checks them
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
        """Take what :func:`perturb` has checked."""
        self._stream = stream
        self.members, self.sigma, self.antithetic, self.seed = members, sigma, antithetic, seed
        self._token = object()
        self._model: nn.Module | None = model
        self._layers = tuple(layers)

    @property
    def model(self) -> nn.Module:
        """The plain model.

        Raises:
            RuntimeError: :meth:`restore` gave it back.

        """
        if self._model is None:
            message = "restore() gave the model back: call perturb() for a new population"
            raise RuntimeError(message)
        return self._model

    @property
    def layers(self) -> tuple[PerturbedLayer, ...]:
        """The perturbed layers with their schemes."""
        return self._layers

    @property
    def shard_multiple(self) -> int:
        """Where the population may be split: at multiples of it, and at its end."""
        return math.lcm(self._stream.SHARD_MULTIPLE, *(layer.scheme.shard_multiple for layer in self._layers))

    def restore(self) -> nn.Module:
        """Give the plain model back and end the population."""
        model, self._model, self._layers = self.model, None, ()
        return model

    @torch.no_grad()
    def sample(self, step: int | Tensor, members: range | None = None) -> PopulationNoise:
        """Draw the noise of a step: the same for the same seed and step, independent otherwise.

        A CUDA graph replays a captured ``sample(step); step.add_(1)`` with new noise each time, where the
        stream is ``philox`` and the step a tensor on the device.

        Args:
            step: the training step, an integer of 0 or more; or the same number as a 0-d int64 tensor on the
                layers' device, which is not checked.
            members: a part of the population, to evaluate it in several calls: it starts at a multiple of
                :attr:`boundary` and ends at one or at the last member.

        Raises:
            ValueError: the part is not one, or the step is none.
            RuntimeError: a CUDA graph is being captured, which would replay the noise of this very step.

        """
        _ = self.model
        step = self._step(step)
        part = range(self.members) if members is None else members
        check_part(part, self.members, self.shard_multiple)
        return PopulationNoise(
            part,
            {
                layer.name: layer.sample(self.seed, step, part, sigma=self.sigma, stream=self._stream)
                for layer in self._layers
            },
            self._token,
        )

    def _step(self, step: int | Tensor) -> int | Tensor:
        """Return a step as streams take it."""
        device = self._layers[0].weight.device
        if isinstance(step, Tensor) and (step.is_cuda or issubclass(self._stream, PhiloxStream)):
            return step_on_device(self._stream, self.seed, step, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            message = (
                f"a CUDA graph would draw the noise of step {step} at every replay: use stream='philox', and "
                f"pass the step as a 0-d int64 tensor on {device} that the captured code advances"
            )
            raise RuntimeError(message)
        return whole_number("step", step)

    @torch.no_grad()
    def __call__(self, x: Tensor, noise: PopulationNoise) -> Any:  # noqa: ANN401  whatever the model returns
        """Run the model on rows [repeats * members, ...], row = repeat * members + member.

        With antithetic sampling the second half of the repeats sees the negated noise.

        Raises:
            ValueError: the rows are no multiple of the noise's members, or the number of repeats
                is odd with antithetic sampling; or the model uses a perturbed parameter in a way
                that cannot be perturbed.

        """
        return self.call_with_activations(x, noise)[0]

    @torch.no_grad()
    def call_with_activations(self, x: Tensor, noise: PopulationNoise) -> tuple[Any, ActivationRecord]:
        """Run the model as a call does, and return with its output what the update needs of it.

        Schemes that learn from the rows of their layers need this record; for others it is empty.
        Within ``torch.compile`` it runs as it does without: what answers for the layers cannot be traced.

        Raises:
            ValueError: as for a call.

        """
        if torch.compiler.is_compiling():
            # Only then: the decorator loads the compiler, and takes its time at every call.
            return torch.compiler.disable(self.call_with_activations)(x, noise)
        self._check_noise(noise)
        rows, members = check_rows(x, len(noise.members), antithetic=self.antithetic), len(noise.members)
        seeing: dict[str, Any] = {"sigma": self.sigma, "antithetic": self.antithetic}
        context = MemberFunctionMode(self._layers, noise.layers, rows=rows, members=members, **seeing)
        model = self.model
        with context:
            y = model(x)
        context.check_reached(type(model).__name__)
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

        The estimate is -1 / (n sigma) * sum_m c_m E_m, with n all evaluations of the population, so that
        ``optimizer.step()`` raises the utilities. Parts of a population add up to the whole.

        Args:
            noise: the noise that the rewards were measured with.
            utilities: c, one number for each member of ``noise``, on any device; with antithetic sampling
                two, first all members with their noise, then all with its negative.
            record: what :meth:`call_with_activations` returned with the outputs, for schemes that learn
                from rows.
            validate: check that utilities are finite, and gradients too, which waits for the device;
                without it NaN goes through.

        Raises:
            ValueError: utilities have another length or are not finite, a scheme lacks its record, or a
                gradient does not fit its parameter's type; layers before that one have had theirs.

        """
        self._check_noise(noise)
        members, sides = len(noise.members), 2 if self.antithetic else 1
        device = self._layers[0].weight.device
        c = signed_utilities(utilities, members, device, antithetic=self.antithetic, validate=validate)
        if record is not None:
            record.check(noise)
        size = length(c)
        evaluations = self.members * sides
        _ = self.model
        for layer in self._layers:
            mine = noise.layers[layer.name]
            layer.accumulate(mine, c / size, size / (evaluations * self.sigma), validate=validate)
            if layer.learns_from_rows:
                seen = () if record is None else record.layers.get(layer.name, ())
                one = c / size / sides
                layer.accumulate_rows(mine, one, size / evaluations, seen, validate=validate)

    @torch.no_grad()
    def member(self, noise: PopulationNoise, member: int, *, negated: bool = False) -> dict[str, Tensor]:
        """Return the ``state_dict`` entries that one member really sees, written out.

        ``model.load_state_dict(population.member(noise, best), strict=False)`` keeps that member.
        """
        sigma = -self.sigma if negated else self.sigma
        plain = dict(self.model.named_parameters(remove_duplicate=False))
        changes = {name: sigma * change for name, change in self.perturbation(noise, member).items()}
        return self.effective_weights({name: plain[name].detach() for name in changes}, changes)

    def effective_weights(
        self, plain: Mapping[str, Tensor], changes: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return what parameters are for a member whose noise is sigma E_m = ``changes``, by name."""
        return effective_weights(self._layers, plain, changes)

    @torch.no_grad()
    def perturbation(self, noise: PopulationNoise, member: int) -> dict[str, Tensor]:
        """Return one member's E_m, written out, by the parameter's name: the slow truth.

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
        """Return the E_m of the noise's members, or of a range of them: [m, *shape] by parameter name.

        With ``directions`` what the update sums, times utilities: nearly always the same.
        """
        stop = stop if stop >= 0 else len(noise.members)
        part = {name: one.narrow(start, stop) for name, one in noise.layers.items()}
        return write_dense_noise(self._layers, part, update_directions=update_directions)

    def _check_noise(self, noise: PopulationNoise) -> None:
        if noise.owner is not self._token:
            message = "this noise was drawn by another population: call this one's sample()"
            raise ValueError(message)
        for layer in self._layers:
            layer.check_parameters()
            layer.check_noise(noise.layers[layer.name])

    @property
    def noise_bytes(self) -> int:
        """Bytes that one step's noise of the whole population holds; nothing is drawn to find out."""
        _, whole, stream = self.model, range(self.members), self._stream
        shapes = (layer.sample(0, 0, whole, device="meta", stream=stream) for layer in self._layers)
        return sum(noise.nbytes for noise in shapes)


def perturb(  # noqa: PLR0913  each is a choice of the user's
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
    """Make a population of a model's perturbed copies.

    Linear and Conv2d weights are perturbed by the scheme; biases and the scales and shifts of normalisation
    layers by dense noise. Parameters with ``requires_grad=False`` stay as they are.

    Args:
        model: any module built of supported layers.
        scheme: one for all layers, or a mapping from name patterns (``"encoder.*"``) to schemes;
            the first pattern that matches a layer decides.
        members: how many copies.
        sigma: the scale of the noise, above 0.
        antithetic: evaluate each member with its noise and with its negative.
        seed: of all noise; no global generator is used.
        exclude: name patterns of modules to leave unperturbed.
        stream: where noise comes from: ``block``, torch's generators, or ``philox``, counters that are
            pure for each element and what kernels draw. By default what the schemes need: ``philox`` for
            noise that is drawn inside of a kernel, else ``block``.

    Raises:
        ValueError: a number is out of range, a pattern matches nothing, or the model holds
            parameters that cannot be perturbed; the message names them.

    """
    check_count("members", members)
    seed = whole_number("seed", seed)
    if not (isinstance(sigma, int | float) and sigma > 0 and math.isfinite(sigma)):
        message = f"sigma must be a number above 0, got {sigma!r}"
        raise ValueError(message)
    patterns = schemes_by_pattern(scheme)
    stream = stream_for(patterns.values(), stream)
    modules = trainable_modules(model, tuple(exclude))
    layers = perturbed_layers(modules, patterns)
    if not layers:
        message = f"nothing to perturb: {type(model).__name__} has no trainable parameters left"
        raise ValueError(message)
    check_layers(STREAMS[stream], (f"{layer.name}.{kind}" for layer in layers for kind in ("weight", "bias")))
    if antithetic and (
        one := next((layer for layer in layers if not layer.scheme.supports_antithetic), None)
    ):
        message = f"{one.scheme} has no negative for antithetic sampling: {one.name!r} has weights of bits"
        raise ValueError(message)
    drawn: dict[str, Any] = {"antithetic": antithetic, "seed": seed, "stream": STREAMS[stream]}
    return Population(model, layers, members=members, sigma=sigma, **drawn)


def signed_utilities(
    utilities: Tensor, members: int, device: torch.device, *, antithetic: bool, validate: bool
) -> Tensor:
    """Return one number for each member, in float64 on ``device``: its utility, or what its two differ by.

    Raises:
        ValueError: they are not as many as there are members, or not all finite, where that is looked at.

    """
    c = torch.as_tensor(utilities, device=device).detach().flatten().double()
    if c.numel() != members * (2 if antithetic else 1):
        message = f"{c.numel()} utilities for {members} members" + " twice (antithetic)" * antithetic
        raise ValueError(message)
    if validate and not bool(c.isfinite().all()):
        message = f"{int((~c.isfinite()).sum())} of {c.numel()} utilities are not finite"
        raise ValueError(message)
    return c[:members] - c[members:] if antithetic else c


def length(c: Tensor) -> Tensor:
    """Return the length of utilities, in float64, but 1 at least.

    Scaled to length 1, utilities of any size fit the narrowest float type; the size comes back in float64.
    Its square need not fit that.
    """
    largest = c.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return largest * (c / largest).norm().clamp_min(1.0)


def check_part(part: range, members: int, boundary: int) -> None:
    """Hold a range of members to where a population of that many may be split.

    Raises:
        ValueError: it is empty, beyond the population, or cut where there is no boundary.

    """
    ends_well = part.stop % boundary == 0 or part.stop == members
    inside = part and part.step == 1 and part.start >= 0 and part.stop <= members
    if not (inside and part.start % boundary == 0 and ends_well):
        message = (
            f"members {part} is no part of the population: parts of 0..{members} start and end "
            f"at multiples of {boundary} (or at the end)"
        )
        raise ValueError(message)


def check_rows(x: Tensor, members: int, *, antithetic: bool) -> int:
    """Return how many rows an input has, [repeats * members, ...].

    Raises:
        ValueError: they are no multiple of the members, or the repeats are odd with antithetic sampling.

    """
    if x.dim() == 0:
        message = "the input has no rows: expected [repeats * members, ...]"
        raise ValueError(message)
    rows = x.shape[0]
    if rows == 0 or rows % members:
        message = (
            f"a batch of {rows} rows is no multiple of {members} members (row = repeat * members + member)"
        )
        raise ValueError(message)
    if antithetic and rows // members % 2:
        message = (
            f"antithetic sampling needs an even number of repeats, got {rows // members} "
            f"({rows} rows, {members} members)"
        )
        raise ValueError(message)
    return rows


def schemes_by_pattern(scheme: AnyScheme | Mapping[str, AnyScheme]) -> dict[str, AnyScheme]:
    """Return schemes by name pattern: one scheme is for all layers.

    Raises:
        ValueError: something stands there that is no scheme.

    """
    patterns = dict(scheme) if isinstance(scheme, Mapping) else {"*": scheme}
    for pattern, value in patterns.items():
        if not isinstance(value, AbstractScheme):
            message = f"the scheme for {pattern!r} must be an instance such as Permuted(), got {value!r}"
            raise ValueError(message)  # noqa: TRY004  one kind of error for every bad argument
    return patterns


def stream_for(schemes: Iterable[AnyScheme], asked: str | None = None) -> str:
    """Return the stream that all of these schemes can draw from: ``philox`` where one of them needs it.

    Raises:
        ValueError: another one was asked for, or one that there is not.

    """
    needing = next((scheme for scheme in schemes if scheme.stream == "philox"), None)
    if asked is None:
        return "philox" if needing else "block"
    if asked not in STREAMS:
        message = f"no stream {asked!r}; there are: {', '.join(STREAMS)}"
        raise ValueError(message)
    if needing and asked != "philox":
        message = (
            f"{needing} draws its noise inside of a kernel, from the stream philox: leave stream out, or ask "
            f"for philox, not {asked!r}"
        )
        raise ValueError(message)
    return asked
