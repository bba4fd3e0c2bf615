"""What a person trains with: a population of perturbed copies of any model.

population = perturb(model, Permuted(in_sparsity=0.5), members=256, sigma=0.02, seed=0)
noise = population.sample(step)
rewards = fitness(population(x, noise))
population.update(noise, utilities)
optimizer.step()
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from impls.perturbation.function_mode import MemberFunctionMode
from impls.perturbation.layer import PerturbedLayer, seen, written
from impls.perturbation.noise import (
    STREAMS,
    NoiseStream,
    PhiloxStream,
    check_layers,
    step_on_device,
    whole_number,
)
from impls.perturbation.options import check_count
from impls.perturbation.scheme import AnyScheme
from impls.perturbation.selection import by_pattern, perturbed, stream_of, trainable
from impls.perturbation.values import (
    PopulationNoise,
    Record,
    check_part,
    check_rows,
    length,
    signed_utilities,
)


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
        return math.lcm(self._stream.BOUNDARY, *(layer.scheme.shard_multiple for layer in self._layers))

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
    def call_with_activations(self, x: Tensor, noise: PopulationNoise) -> tuple[Any, Record]:
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
        return y, Record(context.seen, noise)

    @torch.no_grad()
    def update(
        self,
        noise: PopulationNoise,
        utilities: Tensor,
        record: Record | None = None,
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
        return self.seen({name: plain[name].detach() for name in changes}, changes)

    def seen(self, plain: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what parameters are for a member whose noise is sigma E_m = ``changes``, by name."""
        return seen(self._layers, plain, changes)

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
        self, noise: PopulationNoise, start: int = 0, stop: int = -1, *, directions: bool = False
    ) -> dict[str, Tensor]:
        """Return the E_m of the noise's members, or of a range of them: [m, *shape] by parameter name.

        With ``directions`` what the update sums, times utilities: nearly always the same.
        """
        stop = stop if stop >= 0 else len(noise.members)
        part = {name: one.narrow(start, stop) for name, one in noise.layers.items()}
        return written(self._layers, part, directions=directions)

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
    patterns = by_pattern(scheme)
    stream = stream_of(patterns.values(), stream)
    modules = trainable(model, tuple(exclude))
    layers = perturbed(modules, patterns)
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
