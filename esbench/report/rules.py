"""The rules by which other tools tell that something became slower, on the replicates of a study of the gate.

Each judges head against base by the launches of one replicate, one process an arm, as these tools do. Nothing
here is their code: a rule is what their documentation says that they decide by.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from esbench.report.gate_arrays import Floats, Pair
from esbench.report.resampling import SEED

LEVELS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1)
"""By which shares head is made slower: its samples are multiplied."""
RESAMPLES = 1000
"""Bootstrap resamples of a comparison."""

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Compared:
    """What the comparisons come to, an entry each: head by base.

    ``least`` is the lower end of the 95 % interval of the ratio of means, by bootstrap; ``p`` holds for each
    level the probability of a rank sum so high, were nothing slower (one-sided).
    """

    medians: Floats
    means: Floats
    least: Floats
    p: Mapping[float, Floats]


Rule = Callable[[Compared, float], Flags]
"""Which comparisons a rule flags where head is made slower by a share."""

RULES: Mapping[str, Rule] = {
    "ratio of medians > 1.02": lambda found, slower: found.medians * (1 + slower) > 1.02,  # noqa: PLR2004  # its name
    "ratio of medians > 1.05": lambda found, slower: found.medians * (1 + slower) > 1.05,  # noqa: PLR2004  # its name
    "ratio of medians > 1.10": lambda found, slower: found.medians * (1 + slower) > 1.10,  # noqa: PLR2004  # its name
    "Mann-Whitney U, p < .05": lambda found, slower: found.p[slower] < 0.05,  # noqa: PLR2004  # its name
    "asv: factor 1.1 and U, p < .002": lambda found, slower: (
        (found.medians * (1 + slower) > 1.1) & (2 * found.p[slower] < 0.002)  # noqa: PLR2004  # its name
    ),
    "pytest-benchmark: mean:5%": lambda found, slower: found.means * (1 + slower) > 1.05,  # noqa: PLR2004  # its name
    "criterion: bootstrap, noise 1 %": lambda found, slower: found.least * (1 + slower) > 1.01,  # noqa: PLR2004  # its name
    "github-action-benchmark: 200%": lambda found, slower: found.means * (1 + slower) > 2,  # noqa: PLR2004  # its name
}


@dataclass(frozen=True)
class Record:
    """What a rule makes of all comparisons: the share that it flags at each level, and of whole suites.

    A suite is all cells of one replicate, with the arms as measured or swapped.
    """

    rule: str
    comparisons: int
    suites: int
    alarmed: int
    flagged: Mapping[float, float]


def records(pairs: Iterable[Pair]) -> list[Record]:
    """Judge every pair twice: as measured, and with the arms swapped, which nothing tells apart."""
    every = list(pairs)
    if not every:
        return []
    found = list(_both(every))
    replicates = np.concatenate([replicate for replicate, _, _ in found])
    suites = [(number, side) for number in sorted({pair.replicate for pair in every}) for side in (0, 1)]
    sides = np.concatenate([np.full(len(replicate), side) for replicate, side, _ in found])
    result = []
    for name, rule in RULES.items():
        flags = {
            slower: np.concatenate([rule(compared, slower) for _, _, compared in found]) for slower in LEVELS
        }
        alarmed = sum(
            bool(flags[0.0][(replicates == number) & (sides == side)].any()) for number, side in suites
        )
        shares = {slower: float(flag.mean()) for slower, flag in flags.items()}
        result.append(Record(name, len(replicates), len(suites), alarmed, shares))
    return result


def _both(every: Sequence[Pair]) -> Iterator[tuple[NDArray[np.intp], int, Compared]]:
    """Yield the comparisons as measured (0) and swapped (1), those of as many launches together."""
    alike: dict[tuple[int, int], list[Pair]] = {}
    for pair in every:
        alike.setdefault((len(pair.base), len(pair.head)), []).append(pair)
    for group in alike.values():
        base, head = np.stack([one.base for one in group]), np.stack([one.head for one in group])
        replicates = np.array([one.replicate for one in group])
        base_means, head_means = _resampled(base, 0), _resampled(head, 1)
        for side, (first, second) in enumerate(((base, head), (head, base))):
            ratios = head_means / base_means if side == 0 else base_means / head_means
            yield replicates, side, _compared(first, second, np.quantile(ratios, 0.025, axis=1))


def _compared(base: Floats, head: Floats, least: Floats) -> Compared:
    with np.errstate(invalid="ignore", divide="ignore"):  # a single launch, or all alike: no rank tells
        p = {
            slower: np.asarray(
                stats.mannwhitneyu(
                    head * (1 + slower), base, alternative="greater", axis=1, method="asymptotic"
                ).pvalue
            )
            for slower in LEVELS
        }
    return Compared(
        medians=np.median(head, axis=1) / np.median(base, axis=1),
        means=head.mean(axis=1) / base.mean(axis=1),
        least=least,
        p=p,
    )


def _resampled(samples: Floats, arm: int) -> Floats:
    """The means of resamples of each row; all rows share which of their entries a resample takes."""
    count = samples.shape[1]
    rng = np.random.default_rng([SEED, arm, count])
    weights = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES) / count
    return samples @ weights.T
