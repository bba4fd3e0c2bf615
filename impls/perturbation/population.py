"""A population of perturbed copies of a model.

population = perturb(model, Permuted(in_sparsity=0.5), members=256, sigma=0.02, seed=0)
noise = population.sample(step)
rewards = fitness(population(x, noise=noise))
population.update(noise, utilities)
optimizer.step()
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from impls.perturbation.errors import UnsupportedError
from impls.perturbation.function_mode import LayerIndex, MemberFunctionMode, RowsAxes
from impls.perturbation.guarded_mode import GuardedMode, PreparedMode, RecordedMode
from impls.perturbation.layer import (
    LayerCall,
    LayerNoise,
    PerturbedLayer,
    RepeatedBatch,
    active_transforms,
    check_memory,
    check_whole,
    matching_names,
    perturbed_layers,
    trainable_modules,
    version_of,
    with_sigmas,
)
from impls.perturbation.noise import (
    STREAMS,
    NoiseStream,
    PhiloxStream,
    check_layer_names,
    keys_of_step,
    to_nonnegative_int,
)
from impls.perturbation.prepared import PreparedForward, Trace, record_trace
from impls.perturbation.scheme import AbstractScheme, AnyScheme, check_count
from impls.perturbation.summary import PopulationSummary, noise_bytes, parameter_count, summarize_layer
from impls.perturbation.verification import check_rows, check_same_axes, find_rows_axes
from impls.perturbation.wasted_members import warn_of_wasted_members
from impls.shaping import Numbers, to_tensor

WIDE, SMALLEST = frozenset({torch.float32, torch.float64}), 2.0**-40
"""Dtypes in which sums of utilities between this number and its inverse lose no digits."""


@dataclass(frozen=True, eq=False)
class PopulationNoise:
    """Noise of one step for a range of members.

    Attributes:
        members: the range of members.
        sigma: the population's sigma when the noise was drawn.
        layers: noise of each layer, by name; empty once :meth:`Population.sample` has overwritten it.
        owner: the population that drew it; other populations refuse it.
    """

    members: range
    sigma: float
    layers: dict[str, LayerNoise]
    owner: "Population"

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(noise.nbytes for noise in self.layers.values())

    def check_not_overwritten(self) -> None:
        """Check that no ``sample(..., out=noise)`` has overwritten this noise.

        Raises:
            ValueError: one has.
        """
        if not self.layers:
            message = "sample(..., out=noise) has overwritten this noise: use the noise that it returned"
            raise ValueError(message)

    def tensors(self) -> list[Tensor]:
        """Return all tensors, layer by layer."""
        return [
            value
            for layer in self.layers.values()
            for value in (*vars(layer.weight).values(), layer.bias)
            if isinstance(value, Tensor)
        ]


@dataclass(frozen=True, eq=False)
class ActivationRecord:
    """Inputs of the layers whose schemes learn from rows.

    Attributes:
        layers: the calls of each such layer, by name.
        noise: the noise that the model ran with.
    """

    layers: Mapping[str, Sequence[LayerCall]]
    noise: PopulationNoise

    def check(self, noise: PopulationNoise) -> None:
        """Check that the record was made with this noise, and that its inputs are unchanged.

        Raises:
            ValueError: it was made with other noise, or inputs were changed in place.
        """
        if self.noise is not noise:
            message = (
                "the record was made with other noise: pass the record that call_with_activations(x, noise) "
                "returned for this noise"
            )
            raise ValueError(message)
        for name, calls in self.layers.items():
            if any(call.version != LayerCall.of(call.operator, call.rows).version for call in calls):
                message = (
                    f"inputs of layer {name!r} were changed in place after its call: its update needs them. "
                    "Write y = y + x instead of y += x, and do not reuse buffers of x"
                )
                raise ValueError(message)


class Population:
    """Perturbed copies of a model, made by :func:`perturb`: member m sees W + sigma E_m.

    The model itself is not changed.

    Attributes:
        model: the plain model.
        layers: the perturbed layers with their schemes.
        members: number of members.
        sigma: scale of the noise; of several, that of the last pattern, to which the others keep their ratio.
            It may be changed before :meth:`sample`, as for a decay; all other attributes are constant.
        antithetic: whether each member is evaluated with its noise and with its negative.
        seed: seed of all noise; :meth:`load_state_dict` changes it.
    """

    def __init__(  # noqa: PLR0913  perturb() checks the arguments
        self,
        model: nn.Module,
        layers: Iterable[PerturbedLayer],
        *,
        members: int,
        sigma: float,
        antithetic: bool,
        seed: int,
        stream: type[NoiseStream],
        optional: frozenset[str] = frozenset(),
        rows_axis: int = 0,
    ) -> None:
        """Store arguments that :func:`perturb` has checked; ``optional`` has names of layers."""
        self.rows_axis = rows_axis
        self._stream, self._optional = stream, optional
        self.members, self.sigma, self.antithetic, self.seed = members, sigma, antithetic, seed
        self.model, self.layers = model, tuple(layers)

    @override
    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute once; only sigma may be changed.

        Raises:
            ValueError: sigma is not a number above 0.
            AttributeError: another attribute would be changed.
        """
        if name == "sigma":
            value = to_sigma(value)
        elif name in vars(self):
            message = f"{name} of a population cannot be changed to {value!r}: call perturb() again"
            raise AttributeError(message)
        super().__setattr__(name, value)

    @cached_property
    def _index(self) -> LayerIndex:
        return LayerIndex(self.layers)

    @cached_property
    def _batches(self) -> WeakTensorKeyDictionary:
        """The batches of the results of :meth:`rows`, while these exist."""
        return WeakTensorKeyDictionary()

    @cached_property
    def traces(self) -> list[Trace]:
        """The last trace of :meth:`prepare`, if there is one."""
        return []

    GRAPH: ClassVar = "_graph"
    """The names of graphs that :mod:`impls.perturbation.compiled` records begin with this."""

    def __getstate__(self) -> dict[str, object]:
        """Return the attributes to copy: in a copy, parameters have other identities."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in {"_index", "_batches", "traces"} and not name.startswith(self.GRAPH)
        }

    @property
    def shard_multiple(self) -> int:
        """The population may be split at multiples of this number."""
        return math.lcm(self._stream.SHARD_MULTIPLE, *(layer.scheme.shard_multiple for layer in self.layers))

    @torch.no_grad()
    def sample(
        self, step: int | Tensor, members: range | None = None, *, out: PopulationNoise | None = None
    ) -> PopulationNoise:
        """Draw the noise of a step.

        Noise is a function of seed, step, layer and member. For new noise at each replay of a CUDA graph, use
        ``stream="philox"`` and capture ``sample(step); step.add_(1)`` with the step as a tensor.

        Schemes that store weights need new noise after each change of the weights. A call refuses old noise,
        but torch does not count changes by ``.data``, NumPy or a fused optimizer: :meth:`update` finds them.

        Args:
            step: the training step, an integer of at least 0, or a 0-d int64 tensor on the layers' device.
                The value of such a tensor is not checked.
            members: the members to draw for, by default all. The range starts at a multiple of
                :attr:`shard_multiple`, and stops at a multiple or at the last member.
            out: noise of an earlier step that is no longer needed. Its memory is overwritten where it fits,
                and it becomes unusable. At most one layer then has old and new noise at once.

        Raises:
            TypeError: ``out`` is not noise.
            ValueError: the step or the part is invalid, or ``out`` is of another population or overwritten.
            RuntimeError: a CUDA graph is being captured, and the step is an int.
        """
        step = self._prepare_step(step)
        part = range(self.members) if members is None else members
        check_shard(part, self.members, self.shard_multiple)
        old: dict[str, LayerNoise] = {}
        if out is not None:
            self._check_owner(out)
            old.update(out.layers)
            out.layers.clear()
        return PopulationNoise(
            part,
            self.sigma,
            {
                layer.name: layer.sample(
                    self.seed,
                    step,
                    part,
                    sigma=self.sigma * layer.sigma_ratio,
                    stream=self._stream,
                    out=old.pop(layer.name, None),
                )
                for layer in self.layers
            },
            self,
        )

    def _prepare_step(self, step: int | Tensor) -> int | Tensor:
        """Return a step as an int, or as the keys of a step on the device."""
        device = self.layers[0].weight.device
        if isinstance(step, Tensor) and (step.is_cuda or issubclass(self._stream, PhiloxStream)):
            return keys_of_step(self._stream, self.seed, step, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            message = (
                f"every replay of the CUDA graph would draw the noise of step {step}: use "
                f"stream='philox', pass the step as a 0-d int64 tensor on {device}, "
                "and increment it inside the capture"
            )
            raise RuntimeError(message)
        return to_nonnegative_int("step", step)

    def __call__(self, *args: Any, noise: PopulationNoise, **kwargs: Any) -> Any:  # noqa: ANN401  the model's
        """Run the model on rows [repeats * members, ...] with row = repeat * members + member.

        With antithetic sampling, the second half of the repeats sees the negated noise.

        Inside code compiled by ``torch.compile`` the call is part of the graph, which serves all steps. The
        model's Python code runs while the compiler runs: attributes of the model other than ``training`` are
        those of that moment. The call breaks the graph and runs eagerly where :meth:`prepare` refuses the
        model, for recurrent modules, and for schemes that store weights or scale noise with them.

        Args:
            *args: the model's arguments. The first tensor among all arguments has the rows in its first axis,
                or in :attr:`rows_axis`.
            noise: the noise of the members.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: the number of rows is not a multiple of the noise's members; the number of repeats is
                odd with antithetic sampling; or the model uses a perturbed parameter in an unsupported way.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_compiled(args, kwargs, noise)
        if torch.is_grad_enabled():  # else no_grad() would only take its 3 microseconds
            with torch.no_grad():
                return self._call("__call__", args, kwargs, noise)[0]
        return self._call("__call__", args, kwargs, noise)[0]

    @torch.no_grad()
    def _call_compiled(self, args: Sequence[Any], kwargs: dict[str, Any], noise: PopulationNoise) -> Any:  # noqa: ANN401  the model's
        from impls.perturbation import compiled  # noqa: PLC0415  it loads the compiler

        return compiled.call(self, noise, args, kwargs)

    @torch.no_grad()
    def call(self, method: str, /, *args: Any, noise: PopulationNoise, **kwargs: Any) -> Any:  # noqa: ANN401  the model's
        """Run another method of the model than its forward, such as ``act`` or ``value`` of an actor-critic.

        All calls with one noise see the same members. A method may leave out layers that other methods use:
        only those that are no longer in the model are an error. The call runs eagerly inside code compiled by
        ``torch.compile``, and makes no record for schemes that learn from rows.

        Args:
            method: the method's name.
            *args: the method's arguments, with rows as for a call of the population.
            noise: the noise of the members.
            **kwargs: the method's keyword arguments.

        Raises:
            AttributeError: the model has no such method.
            ValueError: as for a call of the population.
        """
        return self._call(method, args, kwargs, noise)[0]

    @torch.no_grad()
    def call_with_activations(
        self,
        *args: Any,  # noqa: ANN401  the model's
        noise: PopulationNoise,
        **kwargs: Any,  # noqa: ANN401  the same
    ) -> tuple[Any, ActivationRecord]:
        """Run the model, and return its output with the activations that the update needs.

        Only schemes that learn from rows need the record. Inside code compiled by ``torch.compile`` this call
        runs eagerly.

        Raises:
            ValueError: as for a call.
        """
        return self._call("__call__", args, kwargs, noise)

    def _call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], noise: PopulationNoise
    ) -> tuple[Any, ActivationRecord]:
        """Run a method of the model, and return its output with the activations."""
        if torch.compiler.is_dynamo_compiling():
            # As a decorator, disable() would load the compiler and slow down every eager call.
            return torch.compiler.disable(self._call)(method, args, kwargs, noise)
        history = self._index.histories[self._key(method, args, kwargs)]
        rows, rows_axes, calls = self._count_rows(noise, args, kwargs), history.rows_axes, history.calls
        if rows_axes is None:
            rows_axes = find_rows_axes(self.model, method, self._index, rows, self.rows_axis, args, kwargs)
        # A later call may take another branch: calls 1, 2, 4, 8, ... are guarded, and new uses are checked.
        mode = MemberFunctionMode if calls & (calls + 1) else GuardedMode
        y, context = self._run(method, mode, rows, rows_axes, noise, args, kwargs)
        uses = history.uses
        if context.uses != uses and any(count > uses.get(use, 0) for use, count in context.uses.items()):
            if history.rows_axes is not None:
                now = find_rows_axes(self.model, method, self._index, rows, self.rows_axis, args, kwargs)
                check_same_axes(rows_axes, now)
            for use, count in context.uses.items():
                uses[use] = max(count, uses.get(use, 0))
        history.rows_axes, history.calls = rows_axes, calls + 1
        return y, ActivationRecord(context.calls, noise)

    def _key(self, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Return what decides where the layers' inputs have their rows."""
        leaves = args if not kwargs else tree_leaves((args, kwargs))
        return method, self.model.training, *(x.shape for x in leaves if isinstance(x, Tensor))

    def _count_rows(
        self, noise: PopulationNoise, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> int:
        x = _first_tensor(args, kwargs)
        return _count_rows(x, count_members(noise), antithetic=self.antithetic, axis=self.rows_axis)

    def _run(  # noqa: PLR0913, PLR0917  a call and its mode
        self,
        method: str,
        mode: type[MemberFunctionMode],
        rows: int,
        rows_axes: RowsAxes,
        noise: PopulationNoise,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, MemberFunctionMode]:
        """Run a method of the model in a function mode; return its output and the mode."""
        self.check_noise(noise)
        if TransformType.Grad in active_transforms():
            message = (
                "a population computes no gradients, so torch.func.grad of its output would be 0: "
                "differentiate inside of the model, or the plain model with population.member(noise, m)"
            )
            raise ValueError(message)
        members = len(noise.members)
        batches: Mapping[int, RepeatedBatch] = {}
        if mode is MemberFunctionMode or mode is GuardedMode:
            batches = self._find_batches(args, kwargs, is_checked=mode is GuardedMode)
        context = mode(
            self._index,
            noise.layers,
            rows=rows,
            members=members,
            sigma=self.sigma,
            antithetic=self.antithetic,
            rows_axes=rows_axes,
            batches=batches,
        )
        try:
            with context:
                y = getattr(self.model, method)(*args, **kwargs)
        except RuntimeError:
            self.check_dtypes(noise)
            raise
        context.check_outputs(y)
        optional = self._optional
        if method != "__call__":
            present = {id(parameter) for parameter in self.model.parameters()}
            optional |= {layer.name for layer in self.layers if id(layer.weight) in present}
        context.check_layers_used(type(self.model).__name__, optional)
        return y, context

    def _find_batches(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, is_checked: bool
    ) -> dict[int, RepeatedBatch]:
        """Return the batches that :meth:`rows` repeated, by the ids of the results among the arguments.

        Raises:
            ValueError: ``is_checked``, and one has other numbers, but torch has counted no change.
        """
        if not self._batches:
            return {}
        results = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x in self._batches]
        batches = {id(x): self._batches[x] for x in results}
        for x in (x for x in results if is_checked and x.is_cpu):  # on a GPU the check would wait
            batch = batches[id(x)]
            is_equal = torch.allclose(
                x.unflatten(0, (1 + self.antithetic, len(batch.x), -1)),
                batch.x.unsqueeze(1),
                rtol=0,
                atol=0,
                equal_nan=True,
            )
            if batch.version == version_of(x) and not is_equal:
                message = (
                    "the result of rows() was changed by .data or NumPy, which torch does not count: change "
                    "it by torch's functions, or pass a clone()"
                )
                raise ValueError(message)
        return batches

    def prepare(self, noise: PopulationNoise, *args: Any, **kwargs: Any) -> PreparedForward:  # noqa: ANN401  the model's
        """Return a faster forward for many calls with one noise, as a policy needs them in a rollout.

        What depends on noise and weights alone is computed once: for small linear layers the members'
        weights, whose products have other roundings. Calls skip the model's Python code: it runs in the first
        ``prepare`` for arguments of these shapes, which takes a second. Attributes of the model other than
        ``training`` are those of that moment. It is the model's forward, not another method as in
        :meth:`call`.

        Args:
            noise: the noise of the members.
            *args: the model's arguments as for a call. Later calls may have other numbers in their tensors,
                but the same shapes and dtypes, and the same other values.
            **kwargs: the model's keyword arguments.

        Returns:
            ``policy``: ``policy(*args, **kwargs)`` is ``population(*args, noise=noise, **kwargs)``, up to
            rounding.

        Raises:
            ValueError: the model's operations depend on numbers in tensors, or it stores values in its
                modules; or as for a call.
            UnsupportedError: the noise is not stored, but drawn again in each call.
        """
        self.check_noise(noise)
        return PreparedForward(record_trace(self, noise, args, kwargs, reuses_noise=True), noise)

    def forward_traced(
        self,
        noise: PopulationNoise,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        reuses_noise: bool,
    ) -> Any:  # noqa: ANN401  the model's output
        """Run the model while :mod:`impls.perturbation.prepared` records its operations."""
        mode = PreparedMode if reuses_noise else RecordedMode
        rows, history = (
            self._count_rows(noise, args, kwargs),
            self._index.histories[self._key("__call__", args, kwargs)],
        )
        assert history.rows_axes is not None  # noqa: S101  the caller has run the model
        return self._run("__call__", mode, rows, history.rows_axes, noise, args, kwargs)[0]

    @torch.no_grad()
    def update(
        self,
        noise: PopulationNoise,
        utilities: Numbers,
        record: ActivationRecord | None = None,
        *,
        validate: bool | None = None,
    ) -> None:
        """Accumulate the gradient estimate into ``.grad`` of the perturbed parameters.

        The estimate is -1 / (n sigma) * sum_m c_m E_m, with n the evaluations of the whole population;
        its sign makes ``optimizer.step()`` increase the utilities. Updates of parts of a population add up to
        the update of the whole.

        Args:
            noise: the noise that the utilities belong to.
            utilities: c, [members of ``noise``], as a tensor on any device, an array or a list. With
                antithetic sampling [2, members] or [2 * members]: first those of all members with their
                noise, then with the negated noise.
            record: the second result of :meth:`call_with_activations`, for schemes that learn from rows.
            validate: check that utilities are finite, that gradients which can overflow do not, and that
                weights which the noise stores have not changed. By default only on a CPU, because the check
                waits for a GPU.

        Raises:
            TypeError: utilities are not real numbers.
            ValueError: utilities have a wrong shape, a utility or a gradient is not finite, or a scheme
                needs a record. Layers before the one with the error have been updated.
        """
        if torch.is_inference_mode_enabled():  # a .grad made in it could not be changed outside
            with torch.inference_mode(mode=False):
                self.update(noise, utilities, record, validate=validate)
            return
        self.check_noise(noise)
        members, sides = len(noise.members), 2 if self.antithetic else 1
        device = self.layers[0].weight.device
        validate = device.type == "cpu" if validate is None else validate
        c = combine_antithetic(utilities, members, device, antithetic=self.antithetic)
        largest: Tensor | float = torch.linalg.vector_norm(c, math.inf)
        if validate or c.is_cpu:  # else it would wait for the device
            largest = float(largest)
        if validate and not math.isfinite(largest):
            raise ValueError(_not_finite(utilities))
        if record is not None:
            record.check(noise)
        if validate:
            for layer in self.layers:
                layer.check_stored_weight(noise.layers[layer.name])
        c, factor = self._scale(c, largest)
        for layer in self.layers:
            layer_noise = noise.layers[layer.name]
            layer_factor = factor if layer.sigma_ratio == 1 else factor / layer.sigma_ratio
            try:
                layer.accumulate(layer_noise, c, layer_factor, validate=validate)
            except RuntimeError:
                self.check_dtypes(noise)
                raise
            if layer.learns_from_rows:
                calls = () if record is None else record.layers.get(layer.name, ())
                # With antithetic sampling c is a difference of two utilities, of which rows use half.
                layer.accumulate_rows(layer_noise, c / sides, factor * self.sigma, calls, validate=validate)

    def _scale(self, c: Tensor, largest: float | Tensor) -> tuple[Tensor, float | Tensor]:
        """Return utilities in the range of the parameters' dtypes, and the factor of their sums of noise.

        Args:
            c: utilities [members] in float32 or float64.
            largest: their largest magnitude, as a tensor if its value is not known.
        """
        scale = -1 / (self.members * (2 if self.antithetic else 1) * self.sigma)
        if not isinstance(largest, Tensor):
            dtypes = {p.dtype for layer in self.layers for p in (layer.weight, layer.bias) if p is not None}
            # Usual utilities take the whole factor in a wide dtype, which saves a pass over each gradient.
            if len(dtypes) == 1 and dtypes <= WIDE and SMALLEST < -scale * largest < 1 / SMALLEST:
                (dtype,) = dtypes
                return c * scale if c.dtype == dtype else (c.double() * scale).to(dtype), 1.0
        # Divided by this size, utilities are in the range of every floating dtype, and so are sums of noise.
        tiny = torch.finfo(torch.float64).tiny
        known = largest.clamp_min(tiny) if isinstance(largest, Tensor) else max(largest, tiny)
        size = known * math.sqrt(len(c))
        return c.double() / size, size * scale

    @torch.no_grad()
    def member(self, noise: PopulationNoise, member: int, *, negated: bool = False) -> dict[str, Tensor]:
        """Return one member's effective weights as ``state_dict`` entries.

        ``model.load_state_dict(population.member(noise, best), strict=False)`` keeps that member.

        Raises:
            ValueError: sigma, or a weight that the noise stores, has changed since the noise was drawn, or a
                layer has another name in the model.
            IndexError: the noise has no such member.
        """
        self.check_noise(noise)
        sigma = -self.sigma if negated else self.sigma
        plain = dict(self.model.named_parameters(remove_duplicate=False))
        changes = {name: sigma * change for name, change in self.perturbation(noise, member).items()}
        if missing := sorted(changes.keys() - plain):
            message = f"the model has no parameter {missing[0]!r} any more: call perturb() again"
            raise ValueError(message)
        return self.effective_weights({name: plain[name].detach() for name in changes}, changes)

    def effective_weights(
        self, plain: Mapping[str, Tensor], changes: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the parameters of a member with sigma E_m = ``changes``, by name."""
        weights = {name: plain[name] + change for name, change in changes.items()}
        for layer in self.layers:
            name = layer.weight_path
            if name in changes:
                weights[name] = layer.effective_weight(plain[name], changes[name])
        return weights

    @torch.no_grad()
    def perturbation(self, noise: PopulationNoise, member: int) -> dict[str, Tensor]:
        """Return one member's E_m as dense tensors, by parameter name, as for :meth:`dense_noise`.

        Raises:
            IndexError: the noise has no such member.
        """
        count = count_members(noise)
        if not 0 <= member < count:
            message = f"member {member} is not in this noise of {count} members: pass 0 to {count - 1}"
            raise IndexError(message)
        return {name: changes[0] for name, changes in self.dense_noise(noise, member, member + 1).items()}

    @torch.no_grad()
    def dense_noise(
        self,
        noise: PopulationNoise,
        start: int = 0,
        stop: int | None = None,
        *,
        update_directions: bool = False,
    ) -> dict[str, Tensor]:
        """Return E_m of members ``start`` to ``stop`` as dense tensors [m, *shape], by parameter name.

        Member m sees W + sigma E_m with the population's sigma: E_m of a layer whose sigma is twice as large
        is doubled, and what the update multiplies by utilities is halved.

        Args:
            noise: the noise.
            start: the first member; 0 is the first member of ``noise``.
            stop: the member after the last; by default all members.
            update_directions: return the tensors that the update multiplies by utilities instead.
        """
        members = count_members(noise)
        noise.check_not_overwritten()
        stop = members if stop is None else stop
        return {
            # Multiplied even by 1, which copies: a scheme may return its noise, which sample() overwrites.
            name: changes * layer.sigma_ratio ** (-1 if update_directions else 1)
            for layer in self.layers
            for name, changes in layer.dense_noise(
                noise.layers[layer.name].narrow(start, stop), update_directions=update_directions
            ).items()
        }

    @torch.no_grad()
    def best(self, noise: PopulationNoise, fitness: Numbers) -> dict[str, Tensor]:
        """Return the weights of the member with the highest fitness, as :meth:`member` does.

        Args:
            noise: the noise that the members were evaluated with.
            fitness: [members], or with antithetic sampling [2, members], as :meth:`fitness` returns it.

        Raises:
            TypeError: the fitness is not made of real numbers.
            ValueError: the fitness has another shape or is not a number, or as for :meth:`member`.
        """
        members, fitness = count_members(noise), to_tensor("fitness", fitness)
        shape = (2, members) if self.antithetic else (members,)
        if tuple(fitness.shape) != shape:
            message = f"best() needs a fitness of shape {list(shape)}, got {list(fitness.shape)}"
            raise ValueError(message)
        if fitness.isnan().any():
            nan = int(fitness.isnan().sum())
            message = f"{nan} of {fitness.numel()} values of the fitness are not numbers: replace them"
            raise ValueError(message)
        side, member = divmod(int(fitness.argmax()), members)
        return self.member(noise, member, negated=side == 1)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return what the noise of later steps depends on, in numbers, texts, lists and dictionaries.

        Weights are not included: save the states of model and optimizer too.

        Args:
            step: the step at which to resume, for :meth:`load_state_dict`.
        """
        return {
            "step": to_nonnegative_int("step", step),
            "seed": self.seed,
            "sigma": self.sigma,
            "settings": self.settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> int:
        """Take over the seed and the sigma of a saved population: each step then has the same noise.

        Args:
            state: the result of :meth:`state_dict`.

        Returns:
            The step at which to resume.

        Raises:
            ValueError: it is not such a state, or that of a population with other members, schemes or layers.
        """
        if missing := [name for name in ("step", "seed", "sigma", "settings") if name not in state]:
            message = f"not the state of a population, because it has no {missing[0]!r}: see state_dict()"
            raise ValueError(message)
        own, saved = self.settings(), state["settings"]
        for name in {**own, **saved}:
            if own.get(name) != saved.get(name):
                message = (
                    f"the state is that of a population with {name}: {saved.get(name, 'missing')}; this one "
                    f"has {own.get(name, 'none')}: call perturb() with the same model and options"
                )
                raise ValueError(message)
        step, seed = (to_nonnegative_int(name, state[name]) for name in ("step", "seed"))
        self.sigma = state["sigma"]
        vars(self)["seed"] = seed  # constant for everybody else
        return step

    def settings(self) -> dict[str, str]:
        """Return all that noise depends on besides seed, step and sigma, as text by name."""
        layers = {
            f"layer {layer.name!r}": (
                f"{layer.scheme} for {str(layer.weight.dtype).removeprefix('torch.')} "
                f"{list(layer.weight.shape)}"
                + ("" if layer.bias is None else " with bias")
                + ("" if layer.sigma_ratio == 1 else f" and {layer.sigma_ratio:g} times sigma")
            )
            for layer in self.layers
        }
        stream = next(name for name, kind in STREAMS.items() if kind is self._stream)
        return {
            "members": str(self.members),
            "antithetic": str(self.antithetic),
            "stream": stream,
            **layers,
        }

    def summary(self) -> PopulationSummary:
        """Return the scheme, the memory of the noise and n_eff of each layer; print it for a table."""
        size = sum(map(parameter_count, self.layers))
        layers = (summarize_layer(layer, self.members, size, self._stream) for layer in self.layers)
        return PopulationSummary(self.members, tuple(layers))

    def rows(self, x: Tensor, noise: PopulationNoise | None = None) -> Tensor:
        """Repeat inputs [batch, ...] so that each member sees all of them: [repeats * members, ...].

        With antithetic sampling each member sees them with its noise, and again with the negated noise.
        A layer that gets the result itself computes once what all members share. Torch counts changes of the
        result, except those by ``.data`` or NumPy: the first calls find them on a CPU, later ones do not.

        Args:
            x: the inputs, or targets that belong to them.
            noise: noise of a part of the members; by default the rows are for all members.

        Raises:
            TypeError: ``x`` is not a tensor.
        """
        if not isinstance(x, Tensor):
            message = f"rows() repeats a tensor, got {type(x).__name__}: convert it with torch.as_tensor()"
            raise TypeError(message)
        members, axis = self.members if noise is None else count_members(noise), self.rows_axis
        sizes = [*x.shape[:axis], 1 + self.antithetic, x.shape[axis], members, *x.shape[axis + 1 :]]
        rows = x.unsqueeze(axis).unsqueeze(axis + 2).expand(sizes).flatten(axis, axis + 2)
        if axis == 0 and not torch.compiler.is_compiling():
            self._note_batch(rows, x)
        return rows

    def _note_batch(self, rows: Tensor, x: Tensor) -> None:
        """Note the batch that a result of :meth:`rows` repeats, for the first layer."""
        if not (rows.requires_grad or rows.is_inference() or active_transforms()):
            self._batches[rows] = RepeatedBatch(x.clone(), version_of(rows))

    def fitness(self, per_row: Numbers, noise: PopulationNoise | None = None) -> Tensor:
        """Average numbers per row, such as negative losses, over each member's rows.

        Args:
            per_row: a number for each row of the population's input, [repeats * members], as a tensor, an
                array or a list.
            noise: the noise, if it is that of a part of the members.

        Returns:
            The means in at least float32, [members]; with antithetic sampling [2, members], first those with
            the noise, then those with the negated noise.

        Raises:
            TypeError: ``per_row`` is not made of real numbers.
            ValueError: ``per_row`` has another shape.
        """
        values = to_tensor("fitness", per_row)
        if values.dim() != 1:
            message = (
                f"fitness needs one number per row, [rows], got shape {list(values.shape)}: average first"
            )
            raise ValueError(message)
        members = self.members if noise is None else count_members(noise)
        _count_rows(values, members, antithetic=self.antithetic)
        values = values.to(torch.promote_types(torch.float32, values.dtype))
        if self.antithetic:
            return values.view(2, -1, members).mean(1)
        return values.view(-1, members).mean(0)

    @torch.no_grad()
    def verify(self, *args: Any, method: str = "__call__", **kwargs: Any) -> None:  # noqa: ANN401  the model's
        """Check that the model works in a population: call it once for a new model.

        Rows of up to four members, with the noise of a random step, are compared with the plain model that
        evaluates each row alone, with its member's written-out weights.

        Args:
            *args: the model's arguments as for a call. All tensors with as long a first axis as the first one
                have rows. Use float32 or float64: in narrower dtypes rounding may hide errors.
            method: the method of the model, if it is evaluated by :meth:`call`.
            **kwargs: the model's keyword arguments.

        Raises:
            ValueError: a row differs, or as for a call.
        """
        check_rows(self, method, args, kwargs)

    def check_noise(self, noise: PopulationNoise) -> None:
        """Check that noise is that of this population, and of its present sigma and weights.

        Raises:
            TypeError: it is not what :meth:`sample` returned.
            ValueError: it is not.
        """
        self._check_owner(noise)
        self.check_sigma_unchanged(noise.sigma)
        for layer in self.layers:
            layer.check_parameters()
            layer.check_noise(noise.layers[layer.name])

    def _check_owner(self, noise: PopulationNoise) -> None:
        count_members(noise)  # raises the TypeError
        if noise.owner is not self:
            message = "this noise was drawn by another population: call sample() of this one"
            raise ValueError(message)
        noise.check_not_overwritten()

    def check_dtypes(self, noise: PopulationNoise) -> None:
        """Check that parameters have the dtypes that noise was drawn for, to explain an error of torch.

        Raises:
            ValueError: one has another dtype.
        """
        for layer in self.layers:
            layer.check_dtypes(noise.layers[layer.name])

    def check_sigma_unchanged(self, drawn_for: float) -> None:
        """Check that sigma is still the one that noise was drawn for.

        Raises:
            ValueError: it was changed.
        """
        if self.sigma != drawn_for:
            message = (
                f"sigma was changed from {drawn_for} to {self.sigma} after sample(): call sample() again"
            )
            raise ValueError(message)

    @property
    def noise_bytes(self) -> int:
        """Memory of one step's noise for the whole population, in bytes; no noise is drawn."""
        return sum(noise_bytes(layer, self.members, self._stream) for layer in self.layers)


def perturb(  # noqa: PLR0913  each is an independent option
    model: nn.Module,
    scheme: AnyScheme | Mapping[str, AnyScheme],
    *,
    members: int,
    sigma: float | Mapping[str, float],
    antithetic: bool = False,
    seed: int = 0,
    exclude: Iterable[str] = (),
    optional: Iterable[str] = (),
    stream: str | None = None,
    rows_axis: int = 0,
    warn: bool = True,
) -> Population:
    """Make a population of perturbed copies of a model.

    The scheme perturbs the weights of Linear, Embedding, attention, recurrent and (transposed) convolution
    modules. Biases, scales and shifts of normalizations, and a module's own parameters get dense noise; any
    function may use them. So do those from which a parametrization, as ``weight_norm``, computes a weight.
    Parameters with ``requires_grad=False`` are not perturbed.

    Args:
        model: any module built of these.
        scheme: one for all layers, or a mapping from glob patterns of layer names (``"encoder.*"``) to
            schemes; the first pattern that matches a layer decides.
        members: number of copies.
        sigma: scale of the noise, above 0, or a mapping from glob patterns of names of modules or weights to
            scales (``{"0": 0.1, "*": 0.02}``); the first pattern that matches decides. Biases have the scale
            of their weights.
        antithetic: evaluate each member with its noise and with its negative.
        seed: seed of all noise; no global generator is used.
        exclude: glob patterns of modules that are not perturbed, nor any module inside them, and of modules'
            own parameters.
        optional: glob patterns of modules or parameters that a forward may leave out. If it leaves out
            another perturbed layer, it raises an error.
        stream: source of the noise: ``block`` (torch's generators) or ``philox`` (counter-based, with the
            same bits in kernels and for any split of the population). By default ``philox`` if a scheme draws
            its noise inside a kernel, else ``block``.
        rows_axis: the axis of the rows in the model's arguments: 1 for a model that takes
            [positions, rows, ...], as torch's transformers and recurrent layers do by default.
        warn: warn of layers that have fewer different perturbations than members, or by their scheme's kappa
            keep less than a tenth of the members (n_eff).

    Raises:
        UnsupportedError: the model has parameters that cannot be perturbed, a scheme does not support a
            layer, or a pattern matches nothing; the message names them.
        ValueError: a number is out of range.
    """
    check_count("members", members)
    seed = to_nonnegative_int("seed", seed)
    sigma_by_pattern = sigma if isinstance(sigma, Mapping) else {"*": sigma}
    sigmas = {pattern: to_sigma(value) for pattern, value in sigma_by_pattern.items()}
    if rows_axis not in {0, 1}:
        message = f"rows_axis must be 0 or 1, got {rows_axis!r}"
        raise ValueError(message)
    patterns = _schemes_by_pattern(scheme)
    stream = _select_stream(patterns.values(), stream)
    excluded = matching_names(model, "exclude", exclude)
    modules = trainable_modules(model, excluded)
    layers = perturbed_layers(modules, patterns, excluded) if modules else []
    left_out = matching_names(model, "optional", optional)
    if not layers:
        message = f"nothing to perturb: every parameter of {type(model).__name__} is frozen or excluded"
        raise UnsupportedError(message)
    layers = with_sigmas(layers, sigmas)
    check_whole(layers)
    check_memory(model, layers)
    check_layer_names(
        STREAMS[stream], (f"{layer.name}.{kind}" for layer in layers for kind in ("weight", "bias"))
    )
    for layer in layers:
        if antithetic and not layer.scheme.supports_antithetic:
            message = (
                f"{layer.scheme} of layer {layer.name!r} does not support antithetic sampling: pass "
                "antithetic=False"
            )
            raise UnsupportedError(message)
    if warn:
        warn_of_wasted_members(layers, members)
    return Population(
        model,
        layers,
        members=members,
        sigma=[*sigmas.values()][-1],
        antithetic=antithetic,
        seed=seed,
        stream=STREAMS[stream],
        rows_axis=rows_axis,
        optional=frozenset(
            layer.name for layer in layers if not left_out.isdisjoint({layer.module_name, layer.weight_path})
        ),
    )


def to_sigma(sigma: object) -> float:
    """Convert sigma, a real number of any type or a 0-d tensor or array of one, to ``float``.

    Raises:
        ValueError: sigma is not a finite number above 0.
    """
    value = sigma.item() if isinstance(sigma, Tensor | np.ndarray) and sigma.ndim == 0 else sigma
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        message = f"sigma must be a number above 0, got {sigma!r}"
        raise ValueError(message)
    return number


def _schemes_by_pattern(scheme: AnyScheme | Mapping[str, AnyScheme]) -> dict[str, AnyScheme]:
    """Return schemes by name pattern; a single scheme matches all layers.

    Raises:
        UnsupportedError: a value is not a scheme.
    """
    patterns = dict(scheme) if isinstance(scheme, Mapping) else {"*": scheme}
    for pattern, value in patterns.items():
        if not isinstance(value, AbstractScheme):
            message = f"the scheme for {pattern!r} must be an instance, such as Permuted(), got {value!r}"
            raise UnsupportedError(message)
    return patterns


def _select_stream(schemes: Iterable[AnyScheme], name: str | None = None) -> str:
    """Return ``name``, or if it is None ``philox`` if a scheme needs it, else ``block``.

    Raises:
        UnsupportedError: the named stream does not exist, or a scheme cannot draw from it.
    """
    fused = next((scheme for scheme in schemes if scheme.stream == "philox"), None)
    if name is None:
        return "philox" if fused else "block"
    if name not in STREAMS:
        message = f"no stream {name!r}: use {' or '.join(map(repr, STREAMS))}"
        raise UnsupportedError(message)
    if fused and name != "philox":
        message = f"{fused} draws its noise inside a kernel: use stream='philox', not stream={name!r}"
        raise UnsupportedError(message)
    return name


def count_members(noise: PopulationNoise) -> int:
    """Return the number of members of noise.

    Raises:
        TypeError: it is not what :meth:`sample` returned.
    """
    if not isinstance(noise, PopulationNoise):
        message = f"noise must be what sample() returned, got {type(noise).__name__}"
        raise TypeError(message)
    return len(noise.members)


def has_utilities_shape(values: Tensor, members: int, *, antithetic: bool) -> bool:
    """Return whether a tensor has the shape [members], or [2, members]; other axes may have length 1."""
    is_flat = sum(size != 1 for size in values.shape) <= 1
    count = members * (2 if antithetic else 1)
    return values.numel() == count and (is_flat or (antithetic and values.shape[:2] == (2, members)))


def combine_antithetic(utilities: Numbers, members: int, device: torch.device, *, antithetic: bool) -> Tensor:
    """Return each member's utility, or with ``antithetic`` the difference of its two, [members].

    They are in float64, or in float32 if this is their dtype and they are no differences.

    Raises:
        TypeError: utilities are not real numbers.
        ValueError: the shape of the utilities is wrong.
    """
    values = to_tensor("utilities", utilities).to(device)
    if not has_utilities_shape(values, members, antithetic=antithetic):
        count = values.numel()
        if count != members * (2 if antithetic else 1):
            sides = "two (antithetic)" if antithetic else "one"
            message = f"got {count} utilities for {members} members: pass {sides} for each member"
            raise ValueError(message)
        expected = f"[2, {members}], first those with the noise" if antithetic else f"[{members}]"
        message = f"got utilities of shape {list(values.shape)} for {members} members: pass {expected}"
        raise ValueError(message)
    c = values.flatten()
    if antithetic or c.dtype not in WIDE:
        c = c.double()
    return c[:members] - c[members:] if antithetic else c


def _not_finite(utilities: Numbers) -> str:
    values = to_tensor("utilities", utilities)
    count = int((~values.isfinite()).sum())
    return f"{count} of {values.numel()} utilities are not finite: replace them"


def check_shard(part: range, members: int, multiple: int) -> None:
    """Check that a range of members is a valid part of a population.

    Raises:
        ValueError: it is empty, outside of the population, or not split at multiples.
    """
    ends_well = part.stop % multiple == 0 or part.stop == members
    inside = part and part.step == 1 and part.start >= 0 and part.stop <= members
    if not (inside and part.start % multiple == 0 and ends_well):
        message = (
            f"members={part} is not a valid part of a population of {members}: start and stop at "
            f"multiples of {multiple}, or stop at {members}"
        )
        raise ValueError(message)


def _first_tensor(args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor:
    """Return the first tensor among a model's arguments, whose first axis is the rows.

    Raises:
        ValueError: there is none.
    """
    if args and isinstance(args[0], Tensor):
        return args[0]
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor):
            return value
    message = "the model got no tensor: pass rows [repeats * members, ...]"
    raise ValueError(message)


def _count_rows(x: Tensor, members: int, *, antithetic: bool, axis: int = 0) -> int:
    """Return the number of rows of an input [repeats * members, ...].

    Raises:
        ValueError: it is not a multiple of the members, or of twice the members with antithetic sampling.
    """
    if x.dim() <= axis:
        message = f"the input of shape {list(x.shape)} has no row axis: pass [repeats * members, ...]"
        raise ValueError(message)
    rows = x.shape[axis]
    if rows == 0 or rows % members:
        message = (
            f"a batch of {rows} rows is not a multiple of {members} members: pass repeats * members "
            "rows, where row = repeat * members + member"
        )
        raise ValueError(message)
    if antithetic and rows // members % 2:
        message = (
            f"antithetic sampling needs an even number of repeats, got {rows // members} "
            f"({rows} rows, {members} members): pass each input twice"
        )
        raise ValueError(message)
    return rows
