"""A population split over the ranks of ``torch.distributed``: each rank evaluates and sums its own members.

What crosses the wire in a step are the fitness of all members and one gradient. Noise is a function of seed,
step and member, so it is drawn where it is used, and results do not depend on the number of ranks.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import esbench
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.layer import all_finite
from impls.perturbation.population import Population, PopulationNoise, has_utilities_shape
from impls.shaping import Numbers, to_tensor


def shard(
    population: Population,
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    parts: int | None = None,
    ordered: bool = False,
) -> "Shard":
    """Split a population over the ranks of a process group; without ``torchrun`` there is one rank.

    Every rank calls this with the same model and population::

        shard = impls.shard(impls.perturb(model, impls.LowRankSign(), members=4096, sigma=0.02))
        for step in range(100):
            fitness = shard.evaluate(step, evaluate)  # evaluate(noise) -> fitness of the noise's members
            optimizer.zero_grad()
            shard.update(impls.centered_ranks(fitness))
            optimizer.step()

    Args:
        population: the population; its model is on this rank's device.
        group: the ranks that share the population, by default all; or a device mesh with one axis.
        parts: how many parts the population is evaluated in, one after the other on a rank. More parts need
            less memory. By default one part for each rank.
        ordered: add the gradients of the parts in their order, so that the sum has the same bits for every
            number of ranks with the same ``parts``. Then the gradient of each part crosses the wire.

    Raises:
        ValueError: the population cannot be split into that many parts, there are fewer parts than ranks,
            ranks have different populations, weights, options or versions, or this process is not in the
            group.
        RuntimeError: a rank has ended, or the group's time limit is over.
        UnsupportedError: a scheme learns from rows, which are not kept.
    """
    group = group.get_group() if isinstance(group, DeviceMesh) else group
    ranks = distributed.get_world_size(group) if distributed.is_initialized() else 1
    if ranks < 1:
        message = f"rank {distributed.get_rank()} of all ranks is not in the group: call shard() on its ranks"
        raise ValueError(message)
    parts = ranks if parts is None else parts
    if ranks > 1:  # before all other checks, which then have the same result on all ranks
        _check_equal_ranks(population, group, {"parts": str(parts), "ordered": str(ordered)})
    if learning := [layer.name for layer in population.layers if layer.learns_from_rows]:
        message = (
            f"layers {learning} learn from the rows of a forward, which a shard does not keep: give them "
            "another scheme, or train without shard()"
        )
        raise UnsupportedError(message)
    return Shard(population, group, split(population, parts, ranks), ordered=ordered)


class Shard:
    """The members of a population that this rank evaluates. Created by :func:`shard`.

    Attributes:
        population: the whole population.
        parts: ranges of members for each rank, in order.
        rank: the number of this rank in the group.
    """

    def __init__(
        self, population: Population, group: ProcessGroup | None, parts: list[list[range]], *, ordered: bool
    ) -> None:
        """Store what :func:`shard` has checked."""
        self.population, self.parts, self._group, self._ordered = population, parts, group, ordered
        self.rank = distributed.get_rank(group) if len(parts) > 1 else 0
        self._step: int | None = None
        self._noise: PopulationNoise | None = None

    @property
    def own_parts(self) -> list[range]:
        """The parts that this rank evaluates."""
        return self.parts[self.rank]

    @torch.no_grad()
    def evaluate(self, step: int, evaluate: Callable[[PopulationNoise], Numbers]) -> Tensor:
        """Evaluate this rank's members, and return the fitness of all members, the same on all ranks.

        Args:
            step: the training step.
            evaluate: returns the fitness of the members of ``noise``, as :meth:`Population.fitness` does:
                [members of noise], or [2, members of noise] with antithetic sampling.

        Returns:
            [members], or [2, members] with antithetic sampling, in float64.

        Raises:
            TypeError: ``evaluate`` did not return real numbers.
            ValueError: ``evaluate`` returned another shape, or ranks have different steps.
            RuntimeError: ``evaluate`` raised on another rank, a rank has ended, or the group's time limit is
                over.
        """
        self._step = self._noise = None
        members, sides = self.population.members, 2 if self.population.antithetic else 1
        device = self.population.layers[0].weight.device
        # The fitness of all members, and the step of each rank: NaN if evaluate raised there.
        values = torch.zeros(sides * members + len(self.parts), dtype=torch.float64, device=device)
        fitness, steps = values[: sides * members].view(sides, members), values[sides * members :]
        steps[self.rank] = step
        try:
            for part in self.own_parts:
                noise = self.population.sample(step, part)
                fitness[:, part.start : part.stop] = self._fitness(evaluate(noise), len(part))
                # Noise of a single part is kept for the update; that of several would not fit at once.
                self._noise = noise if len(self.own_parts) == 1 else None
        except Exception:
            steps[self.rank] = torch.nan  # the other ranks wait for this sum
            self._sum_over_ranks(values)
            raise
        self._sum_over_ranks(values)  # adding the zeros of other ranks changes no bit
        _check_equal_steps(steps.tolist())
        self._step = step
        return fitness if self.population.antithetic else fitness[0]

    @torch.no_grad()
    def update(self, utilities: Numbers) -> None:
        """Add the gradient of the whole population to ``.grad``, the same on all ranks.

        Args:
            utilities: one number for each member of the population, in the shape of the fitness that
                :meth:`evaluate` returned last.

        Raises:
            TypeError: utilities are not real numbers.
            ValueError: :meth:`evaluate` was not called before, utilities have another shape, or a utility or
                the gradient of a rank is not finite. All ranks raise it, and ``.grad`` is not changed.
            RuntimeError: a rank has ended, or the group's time limit is over.
        """
        if torch.is_inference_mode_enabled():  # a .grad made in it could not be changed outside
            with torch.inference_mode(mode=False):
                self.update(utilities)
            return
        parameters = _parameters(self.population)
        gradients, failure = list[Tensor](), None
        try:
            gradients = self._own_gradients(parameters, utilities)
        except Exception as error:  # noqa: BLE001  the other ranks wait for the sum, and find the NaN
            failure = error
            gradients = [torch.full_like(_concatenate(parameters), torch.nan)] * len(self.own_parts)
        total = self._sum_in_order(gradients) if self._ordered else self._sum(gradients)
        if failure is not None:
            raise failure
        if not all_finite(total):
            message = (
                "the gradient of a rank is not finite: its utilities are not, or are too large, or it raised "
                "another error; see the messages of all ranks"
            )
            raise ValueError(message)
        self._step = self._noise = None
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, values in zip(parameters, total.split(sizes), strict=True):
            gradient = values.view_as(parameter).to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _own_gradients(self, parameters: list[nn.Parameter], utilities: Numbers) -> list[Tensor]:
        """Return the gradient of each of this rank's parts as a vector.

        Raises:
            ValueError: as for :meth:`update`.
        """
        if self._step is None:
            message = "update needs the noise of a step: call evaluate(step, ...) first"
            raise ValueError(message)
        members, antithetic = self.population.members, self.population.antithetic
        utilities = to_tensor("utilities", utilities)
        if not has_utilities_shape(utilities, members, antithetic=antithetic):
            expected = f"[2, {members}]" if antithetic else f"[{members}]"
            message = (
                f"got utilities of shape {list(utilities.shape)} for {members} members of all ranks: pass "
                f"{expected}"
            )
            raise ValueError(message)
        if not all_finite(utilities):
            message = "a utility is not finite: replace it, on all ranks"
            raise ValueError(message)
        utilities = utilities.reshape(2 if antithetic else 1, -1)
        gradients = []
        for part in self.own_parts:
            noise = self._noise or self.population.sample(self._step, part)
            gradients.append(_gradient(self.population, parameters, noise, utilities[:, noise.members]))
        return gradients

    def _fitness(self, values: Numbers, members: int) -> Tensor:
        """Return what ``evaluate`` returned as [1, members], or [2, members] with antithetic sampling."""
        antithetic = self.population.antithetic
        values = to_tensor("the result of evaluate", values)
        if not has_utilities_shape(values, members, antithetic=antithetic):
            expected = f"[2, {members}]" if antithetic else f"[{members}]"
            message = f"evaluate returned fitness of shape {list(values.shape)} instead of {expected}"
            raise ValueError(message)
        return values.reshape(2 if antithetic else 1, members)

    def _sum(self, gradients: list[Tensor]) -> Tensor:
        total = sum(gradients[1:], start=gradients[0])
        self._sum_over_ranks(total)
        return total

    def _sum_in_order(self, gradients: list[Tensor]) -> Tensor:
        """Return the sum of the gradients of all parts, from the first to the last."""
        total = torch.zeros_like(gradients[0])
        for rank, parts in enumerate(self.parts):
            for index in range(len(parts)):
                gradient = gradients[index] if rank == self.rank else torch.empty_like(total)
                if len(self.parts) > 1:
                    with _lost_ranks_named():
                        distributed.broadcast(gradient, group=self._group, group_src=rank)
                total += gradient
        return total

    def _sum_over_ranks(self, values: Tensor) -> None:
        if len(self.parts) > 1:
            with _lost_ranks_named():
                distributed.all_reduce(values, group=self._group)


def split(population: Population, parts: int, ranks: int) -> list[list[range]]:
    """Return consecutive parts of the members for each rank, of nearly equal length.

    Raises:
        ValueError: there are fewer parts than ranks, or fewer places to split at than parts.
    """
    multiple, members = population.shard_multiple, population.members
    units = -(-members // multiple)
    if parts < ranks:
        message = f"{parts} parts are fewer than {ranks} ranks: pass parts of at least {ranks}"
        raise ValueError(message)
    if units < parts:
        message = f"{members} members cannot be split into {parts} parts at multiples of {multiple}"
        if multiple > 1:
            message += ": pass stream='philox' to perturb(), which may be split at each member"
        raise ValueError(message)
    ends = [min(units * (part + 1) // parts * multiple, members) for part in range(parts)]
    ranges = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [ranges[parts * rank // ranks : parts * (rank + 1) // ranks] for rank in range(ranks)]


def _parameters(population: Population) -> list[nn.Parameter]:
    """Return the perturbed parameters, each once."""
    weights = [layer.weight for layer in population.layers]
    biases = [layer.bias for layer in population.layers if layer.bias is not None]
    return list({id(parameter): parameter for parameter in (*weights, *biases)}.values())


def _gradient(
    population: Population, parameters: list[nn.Parameter], noise: PopulationNoise, utilities: Tensor
) -> Tensor:
    """Return the gradient of a part of the members as one vector, and leave ``.grad`` as it is."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        population.update(noise, utilities if population.antithetic else utilities[0])
        return _concatenate([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Return all numbers of some tensors as one vector, in their widest dtype, at least float32."""
    wide = torch.float32
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    return torch.cat([tensor.to(wide).flatten() for tensor in tensors])


@contextmanager
def _lost_ranks_named() -> Iterator[None]:
    """Name the usual reasons for an error of a collective, which speaks of sockets."""
    try:
        yield
    except RuntimeError as error:
        message = (
            "lost a rank: it has ended, or it took longer than the process group's time limit, which is "
            "init_process_group(timeout=...); see the messages of all ranks"
        )
        raise RuntimeError(message) from error


def _check_equal_steps(steps: list[float]) -> None:
    """Raise an error if ranks have evaluated different steps, or if one raised, whose step is NaN."""
    for rank, step in enumerate(steps):
        if math.isnan(step):
            message = f"evaluate raised an error on rank {rank}: see the messages of that rank"
            raise RuntimeError(message)
        if step != steps[0]:
            message = f"all ranks need one step: it is {steps[0]:.0f} on rank 0, {step:.0f} on rank {rank}"
            raise ValueError(message)


def _check_equal_ranks(
    population: Population, group: ProcessGroup | None, options: Mapping[str, str]
) -> None:
    """Raise ValueError on all ranks if one has another population, other weights, options or versions."""
    model = population.model
    checksums = {
        f"the checksum of {name}": _checksum(tensor)
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers())
    }
    own_settings = {
        "torch": torch.__version__,
        "esbench": esbench.__version__,
        "seed": str(population.seed),
        "sigma": str(population.sigma),
        **population.settings(),
        **options,
        **checksums,
    }
    ranks: list[dict[str, str]] = [{} for _ in range(distributed.get_world_size(group))]
    with _lost_ranks_named():
        distributed.all_gather_object(ranks, own_settings, group=group)
    for rank, rank_settings in enumerate(ranks):
        for name in {**ranks[0], **rank_settings}:
            first, value = (settings.get(name, "missing") for settings in (ranks[0], rank_settings))
            if value != first:
                message = (
                    f"all ranks need one population: {name} is {first} on rank 0, {value} on rank {rank}"
                )
                raise ValueError(message)


def _checksum(tensor: Tensor) -> str:
    """Return the sum of all numbers with weights from 1 to 2: all orthogonal matrices have the same norm.

    It has six digits, as devices of two kinds round sums differently.
    """
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = tensor.detach().flatten().double()
    return f"{values @ torch.linspace(1, 2, len(values), dtype=values.dtype, device=values.device):.6g}"
