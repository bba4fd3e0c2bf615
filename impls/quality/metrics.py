"""The quality figures of a scheme on a case."""

from collections.abc import Iterator

from esbench.registry import Figure
from impls.quality import gradient_cosine, kappa, structure
from impls.quality.gradient_cosine import Descent
from impls.quality.kappa import Moments, Subject

FITTED, DECLARED, UNSEEN = "linear fitness", "closed form", "unseen"
MEASURED = "at sigma"
ONE = "one perturbation"
SWEEP_REPLICATES = 3
"""Number of steps for each sigma of the sweep."""
ROWS = "its update is computed from rows, and is not a sum of utilities times noise: the law does not apply"
NO_DIRECTION = "its cosine is 0 within the error: at some step the estimate does not point along the gradient"


def figures(subject: Subject) -> Iterator[Figure]:
    """Yield figures of the quality law and of the noise's structure; a sample is a step's value."""
    looks = [kappa.look(subject, step) for step in range(kappa.REPLICATES)]
    yield from _law(subject, looks)
    yield from _pairs(subject, looks)
    yield from _one(subject)
    pairs = (structure.correlations(subject, 2 * step) for step in range(kappa.REPLICATES))
    layers, steps = zip(*pairs, strict=True)
    yield Figure("correlation", "layers", layers)
    yield Figure("correlation", "steps", steps)


def _pairs(subject: Subject, looks: list[Moments]) -> Iterator[Figure]:
    """Yield moments of inner products of two members, and their correlation."""
    reason = "one member has no pair" if subject.members == 1 else ""
    if any(look.trace == 0 for look in looks):
        reason = kappa.ZERO
    if reason:
        yield Figure("dot_mean", "pairs", reason=reason)
        yield Figure("correlation", "members", reason=reason)
        return
    mean, variance = zip(*(structure.dots(one, subject.size) for one in looks), strict=True)
    yield Figure("dot_mean", "pairs", mean)
    yield Figure("dot_variance", "pairs", variance)
    yield Figure("correlation", "members", tuple(map(structure.member_correlation, looks)))


def _one(subject: Subject) -> Iterator[Figure]:
    """Yield the spectrum and stable rank of one member's largest weight."""
    try:
        spread, rank = structure.spectrum(subject)
    except ValueError as error:
        yield from (Figure(metric, ONE, reason=str(error)) for metric in ("singular_values", "stable_rank"))
    else:
        yield Figure("singular_values", ONE, spread)
        yield Figure("stable_rank", ONE, (rank,))


def on_digits(subject: Subject) -> Iterator[Figure]:
    """Yield cosines with backpropagation's gradient on a network, over sigma and at the subject's sigma."""
    here = Descent.of(subject)
    for sigma in gradient_cosine.SIGMAS:
        cosines = tuple(here.cosine(sigma, step) for step in range(SWEEP_REPLICATES))
        yield Figure("cosine", f"sigma={sigma:g}", cosines)
    own = tuple(here.cosine(subject.sigma, step) for step in range(kappa.REPLICATES))
    if min(own) <= 0:
        yield Figure("effective_members", MEASURED, reason=NO_DIRECTION)
    else:
        worth = tuple(gradient_cosine.worth(one, subject.size) for one in own)
        yield Figure("effective_members", MEASURED, worth)


def _law(subject: Subject, looks: list[Moments]) -> Iterator[Figure]:
    """Yield kappa, fitted and in closed form, and the effective population."""
    if kappa.learns_from_rows(subject):
        yield Figure("kappa", FITTED, reason=ROWS)
        return
    members, size = subject.members, subject.size
    try:
        fitted = kappa.fitted(subject, looks)
    except ValueError as error:
        yield Figure("kappa", FITTED, reason=str(error))
        return
    yield Figure("kappa", FITTED, fitted)
    declared = kappa.closed_form(subject)
    if declared is not None:
        yield Figure("kappa", DECLARED, (declared,))
    yield Figure("kappa", UNSEEN, (kappa.unseen(looks, size),))
    worth = tuple(kappa.effective_members(members, size, value) for value in fitted)
    yield Figure("effective_members", FITTED, worth)
