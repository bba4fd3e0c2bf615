"""Masks of sparse weights: how many entries each layer keeps, which ones, and how they change in training.

The rule is RigL's (Evci et al. 2020, Rigging the Lottery, algorithm 1): the active entries of smallest
magnitude are dropped, and as many are grown where the dense gradient is largest. Entries are selected by
index, never by a threshold, so their number is exact even with ties, zeros and NaN. A dropped entry may be
grown again at once; it then keeps its value.
"""

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.conv import _ConvNd

Distribution = Literal["uniform", "erk"]

SAMPLE = 2**14
"""Number of scores that are sampled to find bounds around the threshold of a selection."""
MARGIN = 5.0
"""Distance of these bounds from the threshold in standard errors."""
CANDIDATES = 1 / 16
"""Largest share of the scores that may lie between the bounds; with more, all scores are searched."""
MAX_DENOMINATOR = 10**9
"""Densities are rounded to fractions with at most this denominator, so that 0.1 and 1 - 0.9 are 1/10."""


def sparsifiable(
    model: nn.Module, *, ignore_linear_layers: bool = False, ignore: Collection[str] = ()
) -> dict[str, nn.Parameter]:
    """Return the trainable weights of linear and convolutional layers by name, each once, in model order.

    Weights that are shared with another kind of layer, such as an embedding, that are parametrized or that
    have no entries are left out.

    Args:
        model: the model.
        ignore_linear_layers: leave out linear layers.
        ignore: names of modules to leave out, with everything below them.

    Raises:
        ValueError: ``ignore`` is a string, or the model has no module of a name in it;
            ``ignore_linear_layers`` is not a bool; or a layer has no shape yet.
    """
    if ignore_linear_layers not in (True, False):
        raise ValueError(f"ignore_linear_layers {ignore_linear_layers!r}: expected True or False")
    if isinstance(ignore, str):
        raise ValueError(f"ignore must be a list of names, got {ignore!r}: pass [{ignore!r}]")  # noqa: TRY004  as for other values
    modules = dict(model.named_modules())
    for name in sorted(set(ignore) - modules.keys()):
        closest = ", ".join(difflib.get_close_matches(name, filter(None, modules), n=3, cutoff=0.0))
        raise ValueError(
            f"ignore: no module {name!r}; closest are {closest}; list all with dict(model.named_modules())"
        )
    excluded = {
        id(parameter)
        for module in modules.values()
        if not isinstance(module, nn.Linear | _ConvNd)
        for parameter in module.parameters(recurse=False)
    }
    excluded |= {id(parameter) for name in ignore for parameter in modules[name].parameters()}
    weights: dict[str, nn.Parameter] = {}
    for path, module in modules.items():
        name = f"{path}.weight".lstrip(".")
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        can_be_sparse = isinstance(module, _ConvNd) or (
            isinstance(module, nn.Linear) and not ignore_linear_layers
        )
        if not can_be_sparse or weight is None or not weight.requires_grad or id(weight) in excluded:
            continue
        if nn.parameter.is_lazy(weight):
            raise ValueError(f"{name} has no shape yet: run a batch through the model first")
        if weight.numel():
            weights[name] = weight
            excluded.add(id(weight))
    return weights


def allocate(
    weights: Mapping[str, Tensor], density: float, distribution: Distribution, first: str = ""
) -> dict[str, int]:
    """Return the number of active entries of each weight: all but floor((1 - density of the layer) * size).

    ``uniform`` gives every layer the same density, but leaves the one named ``first`` dense unless it is the
    only one; ``erk`` gives small layers a higher one, see :func:`erk`.

    Raises:
        ValueError: there are no weights.
    """
    if not weights:
        raise ValueError(
            "the model has no linear or convolutional layer that could be made sparse, "
            "or its linear layers are left out: pass ignore_linear_layers=False"
        )
    if distribution == "erk":
        densities = erk([weight.shape for weight in weights.values()], density)
    else:
        is_dense = {first} if len(weights) > 1 else set()
        densities = [Fraction(1) if name in is_dense else _fraction(density) for name in weights]
    return {
        name: weight.numel() - math.floor((1 - layer_density) * weight.numel())
        for (name, weight), layer_density in zip(weights.items(), densities, strict=True)
    }


def random_masks(
    weights: Mapping[str, Tensor],
    density: float,
    distribution: Distribution,
    generator: Generator,
    first: str = "",
) -> dict[str, Tensor]:
    """Return random masks of the weights that are not dense, see :func:`allocate`."""
    counts = allocate(weights, density, distribution, first)
    return {
        name: random_mask(weight, counts[name], generator)
        for name, weight in weights.items()
        if counts[name] < weight.numel()
    }


def erk(shapes: Sequence[Sequence[int]], density: float) -> list[Fraction]:
    """Return layer densities proportional to sum(shape) / prod(shape) with the given overall density.

    Erdos-Renyi-Kernel, Evci et al. 2020, section 3. A layer that would exceed density 1 is dense, and the
    others share the rest.
    """
    sizes = [math.prod(shape) for shape in shapes]
    unscaled = [Fraction(sum(shape), size) for shape, size in zip(shapes, sizes, strict=True)]
    active = _fraction(density) * sum(sizes)
    dense: set[int] = set()
    while len(dense) < len(shapes):
        sparse = [layer for layer in range(len(shapes)) if layer not in dense]
        active_in_sparse = active - sum(sizes[layer] for layer in dense)
        scale = active_in_sparse / sum(unscaled[layer] * sizes[layer] for layer in sparse)
        largest = max(unscaled[layer] for layer in sparse)
        if scale * largest <= 1:
            return [
                Fraction(1) if layer in dense else scale * unscaled[layer] for layer in range(len(shapes))
            ]
        dense |= {layer for layer in sparse if unscaled[layer] == largest}
    return [Fraction(1)] * len(shapes)


def random_mask(weight: Tensor, nonzero: int, generator: Generator) -> Tensor:
    """Return a random mask, in the shape and on the device of a weight, with exactly ``nonzero`` entries.

    The generator is on the CPU, so the mask does not depend on the device.
    """
    mask = torch.zeros(weight.numel(), dtype=torch.bool)
    mask[torch.randperm(weight.numel(), generator=generator)[:nonzero]] = True
    return mask.view(weight.shape).to(weight.device)


@torch.no_grad()
def drop_and_grow(
    weight: Tensor, gradient: Tensor, mask: Tensor, count: int, *, narrowed: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the next mask, from two partial selections of ``count`` entries.

    Needs at most 16 bytes of temporary memory per entry of a float32 weight, for scores, masks and the
    candidates' values and indices.

    Args:
        weight: any shape.
        gradient: the dense gradient, same shape and dtype.
        mask: bool, same shape.
        count: number of entries to drop and to grow, at most the number of active ones.
        narrowed: bound the threshold by a sample first and select only among the entries between the bounds.
            Ten times faster on a CPU, where ``topk`` sorts 16-byte pairs of all values and indices, and the
            default there. On other devices it makes the host wait for the device.

    Returns:
        The mask, unchanged if the gradient is not finite, and whether it is finite: a bool tensor without
        dimensions on the weight's device.
    """
    narrowed = weight.is_cpu if narrowed is None else narrowed
    active = mask.flatten().clone()
    scores = weight.abs().flatten().nan_to_num_(nan=0.0).neg_()  # finite, as -inf marks inactive entries
    scores.masked_fill_(~active, -math.inf)
    active ^= _largest(scores, count, narrowed=narrowed)  # drop
    torch.abs(gradient.flatten(), out=scores)
    is_finite = scores.amax().isfinite()
    if narrowed and not is_finite:
        return mask.clone(), is_finite
    scores.masked_fill_(active, -math.inf)
    active ^= _largest(scores, count, narrowed=narrowed)  # grow
    return torch.where(is_finite, active.view(mask.shape), mask), is_finite


@torch.no_grad()
def zero_changed(tensors: Sequence[Tensor], before: Tensor, after: Tensor) -> None:
    """Set entries that are not in both masks to zero, in place, in a weight and its optimizer state."""
    changed = ~(before & after)
    for tensor in tensors:
        tensor.masked_fill_(changed, 0)


def _largest(scores: Tensor, count: int, *, narrowed: bool) -> Tensor:
    """Return a mask [n] of the ``count`` largest of scores [n]; ties are broken arbitrarily."""
    if narrowed and len(scores) > SAMPLE and (chosen := _largest_by_sample(scores, count)) is not None:
        return chosen
    is_minority = 2 * count <= len(scores)  # select the smaller part: every selected entry takes an index
    size = count if is_minority else len(scores) - count
    selected = scores.topk(size, largest=is_minority, sorted=False).indices
    chosen = torch.full_like(scores, not is_minority, dtype=torch.bool)
    chosen[selected] = is_minority
    return chosen


def _largest_by_sample(scores: Tensor, count: int) -> Tensor | None:
    """Return the mask of :func:`_largest`, or None if too many scores lie between bounds of its threshold.

    The bounds are scores of a random sample, :data:`MARGIN` standard errors above and below the threshold.
    """
    generator = Generator().manual_seed(0)
    sample = scores[torch.randint(len(scores), (SAMPLE,), generator=generator).to(scores.device)]
    share = count / len(scores)
    margin = MARGIN * math.sqrt(SAMPLE * share * (1 - share)) + 1
    upper_rank, lower_rank = math.floor(SAMPLE * share - margin), math.ceil(SAMPLE * share + margin)
    upper = float(sample.kthvalue(SAMPLE - upper_rank).values) if upper_rank >= 0 else math.inf
    lower = float(sample.kthvalue(SAMPLE - lower_rank).values) if lower_rank < SAMPLE else -math.inf
    chosen = scores > upper
    missing = count - int(chosen.count_nonzero())
    added = torch.empty_like(chosen)
    # Next come scores equal to the upper bound, scores between the bounds, and scores equal to the lower one.
    # Of many equal scores any will do; between the bounds topk selects.
    for compare, bound, are_equal in (
        (torch.ge, upper, True),
        (torch.gt, lower, False),
        (torch.ge, lower, True),
    ):
        if missing <= 0:
            break
        compare(scores, bound, out=added)
        added &= ~chosen
        added_count = int(added.count_nonzero())
        if added_count > missing and are_equal:
            added[added.nonzero().flatten()[missing:]] = False
        elif added_count > missing:
            if added_count > CANDIDATES * len(scores):
                return None
            candidates = added.nonzero().flatten()
            largest = candidates[scores[candidates].topk(missing, sorted=False).indices]
            added.zero_()[largest] = True
        chosen |= added
        missing -= min(added_count, missing)
    return chosen if missing == 0 else None


def _fraction(density: float) -> Fraction:
    return Fraction(density).limit_denominator(MAX_DENOMINATOR)
