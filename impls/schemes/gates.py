"""Gradients for gates that are on or off at random: how much more utility a higher probability buys.

A gate g is on with probability q = sigmoid(logit). F, the expected utility, has

    dF/dq = E[f (g - q)] / (q (1 - q)) = E[f | on] - E[f | off]        dF/dlogit = E[f (g - q)],

whatever f is and however gates act together. Each estimate here has exactly that expectation. Utilities may
be of any float type: they are widened to float32, or to the type of q where that is wider, centred and scaled
before anything is multiplied.
"""

import torch
from torch import Tensor


def logit_gradient(utilities: Tensor, gates: Tensor, keep: Tensor | float) -> Tensor:
    """Estimate dF/dlogit from members with gates drawn independently, [*gates].

    Utilities are centred by their mean, which n - 1 in place of n makes up for: a member's own utility is
    in the mean (REINFORCE with the others' mean as its baseline). A member alone is not centred.

    Args:
        utilities: [n], one for each member.
        gates: [n, *gates], of any type: 1 where a gate was on, 0 where it was off.
        keep: q, [*gates] or one number for all.

    Raises:
        ValueError: there are no members, or another number of utilities, or one that is not finite.

    """
    _check(utilities, gates)
    values, size = _scaled(utilities, keep, centred=len(utilities) > 1)
    spread = gates.to(values.dtype) - keep
    return torch.tensordot(values, spread, dims=1) * (size / max(len(values) - 1, 1))


def keep_gradient(utilities: Tensor, gates: Tensor, keep: Tensor | float) -> Tensor:
    """Estimate dF/dq = E[f | on] - E[f | off] from members with gates drawn independently, [*gates].

    Arguments and errors are those of :func:`logit_gradient`; no q may be 0 or 1.
    """
    return logit_gradient(utilities, gates, keep) / (keep * (1 - keep))


def antithetic_gates(uniform: Tensor, keep: Tensor | float) -> tuple[Tensor, Tensor]:
    """Turn numbers [n, *gates], uniform in [0, 1), into gates and those of each member's partner, both bool.

    A gate and its partner are each on with probability q, and disagree as often as they can.
    """
    return uniform >= 1 - keep, uniform < keep


def disarm(utilities: Tensor, gates: Tensor, opposite: Tensor, keep: Tensor | float) -> Tensor:
    """Estimate dF/dlogit from antithetic pairs, [*gates]: DisARM.

    A pair says something about the gates in which it disagrees, and only by the difference of its two
    utilities, so utilities need no centring. It is ARM with everything but the gates averaged out, so its
    variance is never above ARM's; at q = 1/2 it is not above that of independent pairs either, elsewhere
    it can be. Source: Dong, Mnih, Tucker 2020, arXiv:2006.10680.

    Args:
        utilities: [2, n], first of the members with ``gates``, then of their partners.
        gates: [n, *gates], the first of :func:`antithetic_gates`.
        opposite: [n, *gates], the second.
        keep: q, [*gates] or one number for all.

    Raises:
        ValueError: there are no pairs, or another number of utilities, or one that is not finite.

    """
    for side, on in zip(utilities, (gates, opposite), strict=True):
        _check(side, on)
    scaled, size = _scaled(utilities, keep, centred=False)
    values = scaled[0] - scaled[1]
    # The larger of q and 1 - q is sigmoid(|logit|).
    larger = torch.maximum(keep, 1 - keep).to(values) if isinstance(keep, Tensor) else max(keep, 1 - keep)
    signs = gates.to(values.dtype) - opposite.to(values.dtype)
    return torch.tensordot(values, signs, dims=1) * larger * (size / (2 * len(values)))


def _scaled(utilities: Tensor, keep: Tensor | float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """Return utilities in float32 or wider, at most 1 in size and perhaps centred, and the size they had."""
    dtype = torch.promote_types(torch.float32, utilities.dtype)
    values = utilities.to(torch.promote_types(dtype, keep.dtype) if isinstance(keep, Tensor) else dtype)
    size = values.abs().amax().clamp_min(torch.finfo(values.dtype).tiny)
    values = values / size
    return (values - values.mean() if centred else values), size


def _check(utilities: Tensor, gates: Tensor) -> None:
    if utilities.dim() != 1 or not len(utilities) or gates.shape[:1] != utilities.shape:
        message = (
            f"gates {tuple(gates.shape)} do not fit utilities {tuple(utilities.shape)}: one for each member"
        )
        raise ValueError(message)
    if not bool(utilities.isfinite().all()):
        message = f"{int((~utilities.isfinite()).sum())} of {utilities.numel()} utilities are not finite"
        raise ValueError(message)
