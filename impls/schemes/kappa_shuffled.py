"""The closed form of kappa for a shuffled Gaussian core, from its second moments.

Given the core C, a member's E is C with its columns, rows or both at random places. Shuffling treats channels
alike, so E[E E^T | C] has on each axis one eigenvalue for the mean over channels and one for deviations from
it. Each is a quadratic form z^T B z' of the T entries of the core that move together: the other side and the
taps. For Gaussian z, and a fraction f of pairs of members with the same core, the mean square over cores of
such a T x T matrix has the trace

    T (tr B)^2 + T (T + 1) tr B^2 f,

and 1 + kappa is the sum of these over all parts, each multiplied by its number of dimensions, times d / (sum
of traces)^2. Utilities are centred over all members: the component common to all cores drops out, the
difference between the means of cores does not, and members with the same core share it in all groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Form(NamedTuple):
    """A quadratic form B over the selected places of one or both axes.

    Attributes:
        trace: tr B.
        square: tr B^2.

    """

    trace: float
    square: float


@dataclass(frozen=True)
class Shuffle:
    """Second moments of shuffling along one axis.

    Attributes:
        width: number of channels.
        kept: number of channels of the core.
        rest: form of each of the width - 1 deviations from the mean over channels.
        residue: form of the mean over channels, as far as it differs between members; None: it does not.
        along: value of the residue for a core that is constant over channels.

    """

    width: int
    kept: int
    rest: Form
    residue: Form | None = None
    along: float = 0.0

    @classmethod
    def moved(cls, width: int, kept: int) -> "Shuffle":
        """Channels go to distinct places: (1 - J / width) / (width - 1), with J all ones."""
        one = 1 / max(1, width - 1)
        return cls(width, kept, Form(one * kept * (1 - 1 / width), one**2 * _deviating(width, kept)))

    @classmethod
    def thrown(cls, width: int, kept: int) -> "Shuffle":
        """Channels go to independent places and add up there: 1 / width."""
        return cls(width, kept, Form(kept / width, kept / width**2))

    @classmethod
    def fetched(cls, width: int, kept: int) -> "Shuffle":
        """Each place reads an independent channel, or zero: (1 - J / width) / width, for the mean as well."""
        form = Form(kept / width * (1 - 1 / width), _deviating(width, kept) / width**2)
        return cls(width, kept, form, form, (1 - kept / width) / width)

    @property
    def mean(self) -> Form:
        """The form of the component common to all members: J / width."""
        return Form(self.kept / self.width, (self.kept / self.width) ** 2)

    @property
    def whole(self) -> Form:
        """The form of the mean over channels: the common component and the residue."""
        if self.residue is None:
            return self.mean
        cross = 2 * self.along * self.mean.trace
        return Form(self.mean.trace + self.residue.trace, self.mean.square + self.residue.square + cross)


def kappa(alike: int, axes: Sequence[Shuffle], shared: float, groups: int) -> float | None:
    """Return kappa of a core shuffled along these axes.

    Args:
        alike: number of entries that move together.
        axes: the shuffled axes, one or two.
        shared: fraction of pairs of members with the same core.
        groups: groups of a grouped convolution.

    Returns:
        kappa, or None if members do not differ (a single channel is shuffled).

    """
    size = math.prod(axis.width for axis in axes)
    parts = [(axes[0].width - 1, axes[0].rest)]
    for axis in axes[1:]:
        first = axes[0]
        parts = [
            ((first.width - 1) * (axis.width - 1), _product(first.rest, axis.rest)),
            (first.width - 1, _product(first.rest, axis.whole)),
            (axis.width - 1, _product(first.whole, axis.rest)),
        ]
    total = sum(count * form.trace for count, form in parts)
    squares = sum(count * _squared(form, alike, shared) for count, form in parts)
    trace, square = _common(axes, alike, shared, groups)
    total, squares = total + trace, squares + square
    return size * squares / total**2 - 1 if total > 0 else None


def _common(axes: Sequence[Shuffle], alike: int, shared: float, groups: int) -> tuple[float, float]:
    """Return trace and mean square of the mean over all channels, within cores and between their means."""
    mean = math.prod(axis.mean.trace for axis in axes)
    own, along = Form(0.0, 0.0), 0.0
    if any(axis.residue for axis in axes):
        forms = [axis.residue or axis.mean for axis in axes]
        own = Form(math.prod(form.trace for form in forms), math.prod(form.square for form in forms))
        along = math.prod(axis.along if axis.residue else axis.mean.trace for axis in axes)
    trace = own.trace + mean * (1 - shared)
    between = (alike * groups + 1) * mean**2 + (alike + 1) * 2 * along * mean
    return trace, trace**2 + (alike + 1) * own.square * shared + between * shared * (1 - shared)


def _product(first: Form, second: Form) -> Form:
    return Form(first.trace * second.trace, first.square * second.square)


def _squared(form: Form, alike: int, shared: float) -> float:
    return form.trace**2 + (alike + 1) * form.square * shared


def _deviating(width: int, kept: int) -> float:
    """Return tr (1 - J / width)^2 over the selected places."""
    return kept - 1 + (1 - kept / width) ** 2
