"""A population split over the ranks of ``torch.distributed``: each rank evaluates and sums its own members.

What crosses the wire in a step are the fitness of all members and one gradient. Noise is a function of seed,
step and member, so it is drawn where it is used, and results do not depend on the number of ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

import esbench
from impls.perturbation.errors import UnsupportedError
from impls.perturbation.layer import all_finite
from impls.perturbation.population import Population, PopulationNoise, has_utilities_shape


def shard(
    population: Population,
    group: ProcessGroup | None = None,
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
        group: the ranks that share the population, by default all.
        parts: how many parts the population is evaluated in, one after the other on a rank. More parts need
            less memory. By default one part for each rank.
        ordered: add the gradients of the parts in their order, so that the sum has the same bits for every
            number of ranks with the same ``parts``. Then the gradient of each part crosses the wire.

    Raises:
        ValueError: the population cannot be split into that many parts, there are fewer parts than ranks, or
            ranks have different populations, weights or versions.
        UnsupportedError: a scheme learns from rows, which are not kept.
    """
    if learning := [layer.name for layer in population.layers if layer.learns_from_rows]:
        message = f"layers {learning} learn from the rows of a forward, which a shard does not keep"
        raise UnsupportedError(message)
    ranks = distributed.get_world_size(group) if distributed.is_initialized() else 1
    if ranks > 1:
        _check_equal_ranks(population, group)
    parts = ranks if parts is None else parts
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
    def evaluate(self, step: int, evaluate: Callable[[PopulationNoise], Tensor]) -> Tensor:
        """Evaluate this rank's members, and return the fitness of all members, the same on all ranks.

        Args:
            step: the training step.
            evaluate: returns the fitness of the members of ``noise``, as :meth:`Population.fitness` does:
                [members of noise], or [2, members of noise] with antithetic sampling.

        Returns:
            [members], or [2, members] with antithetic sampling, in float64.

        Raises:
            ValueError: ``evaluate`` returned another shape. If it raises on one rank, the others get NaN for
                the members of that rank.
        """
        self._step = self._noise = None
        members, sides = self.population.members, 2 if self.population.antithetic else 1
        device = self.population.layers[0].weight.device
        fitness = torch.zeros(sides, members, dtype=torch.float64, device=device)
        own = range(self.own_parts[0].start, self.own_parts[-1].stop)
        try:
            for part in self.own_parts:
                noise = self.population.sample(step, part)
                fitness[:, part.start : part.stop] = self._fitness(evaluate(noise), len(part))
                # Noise of a single part is kept for the update; that of several would not fit at once.
                self._noise = noise if len(self.own_parts) == 1 else None
        except Exception:
            # The other ranks wait for this sum. They find the NaN.
            fitness[:, own.start : own.stop] = torch.nan
            self._sum_over_ranks(fitness)
            raise
        self._sum_over_ranks(fitness)  # adding the zeros of other ranks changes no bit
        self._step = step
        return fitness if self.population.antithetic else fitness[0]

    @torch.no_grad()
    def update(self, utilities: Tensor) -> None:
        """Add the gradient of the whole population to ``.grad``, the same on all ranks.

        Args:
            utilities: one number for each member of the population, in the shape of the fitness that
                :meth:`evaluate` returned last.

        Raises:
            ValueError: :meth:`evaluate` was not called before, a utility is not finite, or the gradient of a
                rank is not. All ranks raise it.
        """
        if self._step is None:
            message = "update needs the noise of a step: call evaluate(step, ...) first"
            raise ValueError(message)
        members, antithetic = self.population.members, self.population.antithetic
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
        parameters = _parameters(self.population)
        gradients, failure = list[Tensor](), None
        for part in self.own_parts:
            noise = self._noise or self.population.sample(self._step, part)
            try:
                gradients.append(_gradient(self.population, parameters, noise, utilities[:, noise.members]))
            except ValueError as error:  # the other ranks wait for the sum, and find the NaN
                failure = error
                gradients.append(torch.full_like(_concatenate(parameters), torch.nan))
        self._step = self._noise = None
        total = self._sum_in_order(gradients) if self._ordered else self._sum(gradients)
        if failure is not None:
            raise failure
        if not all_finite(total):
            message = "the gradient is not finite on some rank: make the utilities smaller, by centered ranks"
            raise ValueError(message)
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, values in zip(parameters, total.split(sizes), strict=True):
            gradient = values.view_as(parameter).to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _fitness(self, values: Tensor, members: int) -> Tensor:
        """Return what ``evaluate`` returned as [1, members], or [2, members] with antithetic sampling."""
        antithetic = self.population.antithetic
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
                    distributed.broadcast(gradient, group=self._group, group_src=rank)
                total += gradient
        return total

    def _sum_over_ranks(self, values: Tensor) -> None:
        if len(self.parts) > 1:
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


def _check_equal_ranks(population: Population, group: ProcessGroup | None) -> None:
    """Raise ValueError on all ranks if one has another population, other weights or other versions."""
    # To six digits, as devices of two kinds round norms differently.
    norms = {
        f"the norm of {name}": f"{parameter.detach().double().norm():.6g}"
        for name, parameter in population.model.named_parameters()
    }
    own_settings = {
        "torch": torch.__version__,
        "esbench": esbench.__version__,
        "seed": str(population.seed),
        "sigma": str(population.sigma),
        **population.settings(),
        **norms,
    }
    ranks: list[dict[str, str]] = [{} for _ in range(distributed.get_world_size(group))]
    distributed.all_gather_object(ranks, own_settings, group=group)
    for rank, rank_settings in enumerate(ranks):
        for name in {**ranks[0], **rank_settings}:
            first, value = (settings.get(name, "missing") for settings in (ranks[0], rank_settings))
            if value != first:
                message = (
                    f"all ranks need one population: {name} is {first} on rank 0, {value} on rank {rank}"
                )
                raise ValueError(message)
