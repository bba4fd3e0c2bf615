"""Examples of tables, each under the rule that it shows: the golden file ``examples.md``."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec

from esbench.report import captions
from esbench.report.analysis.comparison import compare
from esbench.report.analysis.quality import Part
from esbench.report.analysis.ranking import RankedVariant, recommend
from esbench.report.site import all_sections, console_tables
from esbench.report.tables import comparison, recommendation, roofline
from esbench.report.tables.measured import time_sections
from esbench.report.tables.published import published_sections
from esbench.report.tables.quality import quality_sections
from esbench.report.tables.ranking import best_schemes, ranking_section, ranking_sections
from esbench.report.tables.recommendation import training_code
from esbench.report.tables.table import Section
from esbench.schema import Case, Phase, Request, Row, RunEnd, Variant
from tests import synthetic
from tests.report import ranking_cases
from tests.report.ranking_cases import CORES, FLIPPED, HADAMARD, LOW_RANK, ORTHOGONAL, SQUARE, quality_row
from tests.synthetic import BASE, DENSE, NAIVE, bytes_row, linear, skipped, three, time_row, variant, working

SMALL, LARGE = linear(256), linear(512)
SPARSE = variant("SparsePerturbed", k=2)
DIGITS = Case(operator="SparseDigits", out_channels=10, in_channels=64, members=1)
_BASE_PHASES: tuple[Phase, ...] = ("update", "step")
Example = tuple[str, str]
"""A rule, and a text that shows it."""


def examples() -> Iterator[Example]:
    """Return all examples."""
    kinds = (times, methods, notes, origins, published, rooflines, rankings, qualities, advice, code, pairs)
    for kind in kinds:
        yield from kind()


def shown(sections: Iterable[Section]) -> str:
    """Return sections in Markdown, without the captions of their runs."""
    return "\n".join(replace(section, origin="").markdown() for section in sections)


def forward(*rows: Row) -> str:
    """Return the tables of the forward."""
    return shown(time_sections(synthetic.run(rows), "Linear", "forward"))


def times() -> Iterator[Example]:
    """Yield examples of rows, columns and cells of times."""
    order = [time_row(Variant(scheme=name, baseline=True), SMALL, 1.0) for name in ("Vmap", "Loop")]
    sparse = [time_row(SPARSE, case, 8, 80) for case in (LARGE, SMALL)]
    yield (
        "Times, speed against naive and time against base; columns by size, baselines last",
        forward(*order, *three(LARGE), *sparse, *three(SMALL)),
    )
    yield (
        "A multiplier is the median of ratios inside rounds: 2 for dense noise, not 1.57 as of medians",
        forward(
            *(time_row(BASE, case, *range(1, last)) for case, last in ((SMALL, 7), (LARGE, 3))),
            time_row(SPARSE, SMALL, *(3 * k + 0.3 * (k == 1) - 0.3 * k * (k == 2) for k in range(1, 7))),
            time_row(DENSE, SMALL, 3, 6, 9, 4, 5, 6),
            time_row(DENSE, LARGE, 3, 6),
        ),
    )
    yield (
        "Each co-resident group has its own base; without a shared round the ratio is one of medians",
        forward(
            time_row(BASE, SMALL, 1, 1),
            time_row(DENSE, SMALL, 3, 3),
            time_row(BASE, SMALL, 2, 2, group=1),
            time_row(SPARSE, SMALL, 4, 4, group=1),
            time_row(FLIPPED, SMALL, 5, 5, group=2),
        ),
    )
    fits = bytes_row(variant("Fits"), LARGE, "largest_members", 768)
    empty = msgspec.structs.replace(time_row(SPARSE, LARGE), samples=((), ()))
    memory = "out of memory: needs 12.5 GB, 2.1 GB are free | give fewer members\nor another machine"
    yield (
        "A cell without a number has its reason: never 0, NaN or a gap",
        forward(
            *three(SMALL),
            time_row(DENSE, LARGE, 1.0),
            synthetic.failed(variant("Failed"), SMALL, "forward is off by 3"),
            skipped(variant("Failed"), SMALL, "no such device"),
            time_row(variant("Failed"), SMALL, 1.0),
            skipped(variant("Reason"), SMALL, "net.0: k = 2 is too large: the weight has 1 column"),
            skipped(
                variant("Reason"), LARGE, "the permutation of this many channels does not fit the index type"
            ),
            skipped(variant("Memory"), LARGE, memory),
            skipped(variant("Fits"), LARGE, "out of memory"),
            msgspec.structs.replace(fits, method="bisection", stop="resolution"),
            skipped(variant("AtLeast"), LARGE, "out of memory"),
            msgspec.structs.replace(fits, variant=variant("AtLeast"), method="bisection", stop="budget"),
            time_row(SPARSE, SMALL, float("nan"), 1.0),
            empty,
        ),
    )
    yield (
        "A run in which nothing could be measured has its reasons",
        forward(skipped(DENSE, SMALL, "no device")),
    )
    phases = [time_row(DENSE, SMALL, 2, phase=phase) for phase in _BASE_PHASES]
    phases.append(time_row(NAIVE, SMALL, 6, phase="update"))
    yield (
        "A baseline without a phase is compared by its forward; a naive update counts for updates",
        shown(time_sections(synthetic.run([*three(SMALL), *phases]), "Linear", "update", "step")),
    )
    lost = [
        skipped(BASE, SMALL, "a step is measured as a whole", "sample"),
        skipped(BASE, SMALL, "out of memory: tried to allocate 9 GB", "update"),
        synthetic.failed(BASE, SMALL, "ValueError", "forward"),
        skipped(DENSE, SMALL, "no device"),
    ]
    yield (
        "A phase without any time is shown if a variant failed in it or ran out of memory",
        shown(time_sections(synthetic.run([time_row(BASE, SMALL, 1, phase="step"), *lost]), "Linear")),
    )
    paired = msgspec.structs.replace(linear(256, members=512, repeats=2), antithetic=True)
    cases = [SMALL, linear(256, dtype="bfloat16"), paired]
    yield (
        "Dtypes never share a table, nor do plain and antithetic populations",
        shown(time_sections(synthetic.run(row for case in cases for row in three(case)), "Linear")),
    )
    sweep = [linear(4, members=2**power) for power in range(3, 8)]
    yield (
        "Cases of one shape have what differs in their headings; a sweep names its first and last batch",
        forward(*(time_row(BASE, case, 1.0) for case in sweep), time_row(BASE, SMALL, 1.0)),
    )


def methods() -> Iterator[Example]:
    """Yield examples of a GPU run: two methods, cold, warm and host times, and a table for each metric."""
    rows: list[Row] = [
        time_row(variant, SMALL, *2 * [ms * factor], method="eager", metric=metric)
        for metric, factor in (("latency_ns", 1), ("warm_latency_ns", 0.1), ("host_latency_ns", 100))
        for variant, ms in ((BASE, 1), (NAIVE, 8), (DENSE, 4))
        if (variant, metric) != (NAIVE, "warm_latency_ns")
    ]
    rows += [time_row(variant, SMALL, 1, 1, method="graph") for variant in (BASE, DENSE)]
    rows += [
        time_row(SPARSE, SMALL, 2, 2, method="eager"),
        synthetic.failed(SPARSE, SMALL, "graph capture failed: it reads the host", "forward", method="graph"),
        skipped(NAIVE, SMALL, "too many launches", "forward", method="graph"),
        # The step has a table of graphs because dense noise has a reason in it; the update has none.
        *(time_row(BASE, SMALL, 1.0, phase=phase, method="graph") for phase in _BASE_PHASES),
        *(time_row(DENSE, SMALL, 2.0, phase=phase, method="eager") for phase in _BASE_PHASES),
        skipped(DENSE, SMALL, "no graph", "step", method="graph"),
        time_row(DENSE, SMALL, 1.0, phase="sample", method="eager"),
        *(
            bytes_row(variant, SMALL, "peak_bytes", size)
            for variant, size in ((BASE, 2 * 10**6), (SPARSE, 5 * 10**6))
        ),
        bytes_row(DENSE, SMALL, "noise_bytes", 268_435_456, phase="sample"),
        *(bytes_row(DENSE, SMALL, metric, 3) for metric in ("launches", "power_w", "energy_j", "unheard")),
    ]
    run = synthetic.run([*rows, *three(synthetic.conv2d())])
    yield (
        "Methods never mix: a reason of one hides no figure of another; every figure has a table",
        shown(all_sections(run)),
    )
    yield (
        "The terminal shows the forward, other phases, memory and energy, and the origin once",
        console_tables(run),
    )


def notes() -> Iterator[Example]:
    """Yield examples of warnings about samples."""
    rows = [
        synthetic.clocks(time_row(BASE, SMALL, 1, 1, 1, 1), 1000, 1000, 1000, 1000),
        synthetic.clocks(time_row(DENSE, SMALL, 2, 2, 2, 2), 1000, 1000, 1000, 900, throttled=("heat",)),
        msgspec.structs.replace(
            time_row(SPARSE, SMALL, 1, 1.1, 1.2, 1.3, 9),
            stop="budget of 1 s",
            labels=("dispatch-bound: 3 of 5 samples",),
        ),
        *synthetic.replaced(
            [time_row(NAIVE, SMALL, 5)],
            stop="budget of 0.2 s",
            warm_up="not flat after 3.10 s",
            labels=("dispatch-bound: in 2 samples",),
        ),
        *synthetic.replaced([time_row(FLIPPED, SMALL, 5)], warm_up="flat after 4 blocks, 0.1 s"),
        *synthetic.replaced([time_row(CORES, SMALL, 5)], warm_up="not flat after 3.00 s"),
    ]
    (section,) = time_sections(synthetic.run(rows), "Linear", "forward")
    yield (
        "Notes on samples are counted by kind, with the worst cell, and change no number",
        shown([replace(section, blocks=section.blocks[:1])]),
    )


def origins() -> Iterator[Example]:
    """Yield examples of captions of runs."""
    run = synthetic.run(three(SMALL))
    runs = [
        run,
        synthetic.run(three(SMALL), invalid=("throttled", "other processes")),
        *(
            synthetic.changed(run, **fields)
            for fields in (
                {"load": 0.5},
                {"load": 3.4},
                {"dirty": True, "commit": None},
                {"request": Request(variants=("*",), dtype="bfloat16", plugins=("mine.py",))},
                {"request": Request(variants=("Base",), phases="forward")},
                {"end": None},
                {"end": RunEnd(status="interrupted", wall_s=1.0)},
            )
        ),
    ]
    text = "\n".join(f"- {captions.origin(captioned)}" for captioned in runs)
    yield "A caption names the run, and warns of what may have disturbed it", f"{text}\n"


def published() -> Iterator[Example]:
    """Yield examples of measured and published multipliers."""
    rows = [*three(SMALL), *three(LARGE), *three(synthetic.conv2d()), *three(linear(1024, members=512))]
    here = synthetic.run([*rows, time_row(SPARSE, SMALL, 1, 2), skipped(FLIPPED, SMALL, "out of memory")])
    theirs = [*three(SMALL), time_row(BASE, LARGE, 1.0), time_row(FLIPPED, SMALL, 1.0)]
    batch = msgspec.structs.replace(SMALL, members=64, dtype="float16")
    unlike: list[Row] = [
        time_row(BASE, batch, 1, 10),
        time_row(NAIVE, batch, 100),
        time_row(DENSE, batch, 8, 80),
    ]
    convolution = synthetic.conv2d()
    padded = synthetic.replaced(three(convolution), case=msgspec.structs.replace(convolution, padding=1))
    paired = synthetic.replaced(three(SMALL), case=msgspec.structs.replace(SMALL, antithetic=True))
    by_device = {"Alike": [*theirs, *padded], "Unlike": unlike, "Alike 2": three(SMALL), "Pairs": paired}
    others = [synthetic.run(rows, device_name=name) for name, rows in by_device.items()]
    yield (
        "Measured / published: another batch is warned of; padding counts",
        "\n".join(section.markdown() for section in published_sections(here, *others)),
    )


def rooflines() -> Iterator[Example]:
    """Yield examples of percentages of the roofline bound."""
    rows: list[Row] = [
        working(time_row(DENSE, SMALL, *[2.0, 2.5] * 4), 1e7, 1e5),
        working(time_row(SPARSE, SMALL, 0.5), 1e7, 1e5),
        working(time_row(FLIPPED, SMALL, 0.25), 0, 1e6),
        time_row(BASE, SMALL, 1.0),
        skipped(DENSE, LARGE, "out of memory"),
    ]
    run = synthetic.run(rows, device_peaks=synthetic.peaks())
    yield (
        "Percent of the bound, bandwidth and arithmetic; a note explains values above 100 %",
        shown(roofline.sections(run, "Linear")),
    )


def without(rows: Iterable[Row], variant: Variant, *names: str) -> list[Row]:
    """Return the rows other than those of a variant in these phases or metrics."""
    return [
        row
        for row in rows
        if not (row.variant == variant and (row.phase in names or getattr(row, "metric", "") in names))
    ]


def near() -> list[Row]:
    """Return rows whose two best are tied, as n_eff is fitted without a closed form."""
    steps = {**ranking_cases.STEPS, LOW_RANK: 5.0005}
    return ranking_cases.without_forms(ranking_cases.rows(steps=steps))


def rankings() -> Iterator[Example]:
    """Yield examples of rankings of cases, and of the best variant of each shape."""
    rows = ranking_cases.rows()

    def ranked(*measured_rows: Row) -> str:
        sections = ranking_sections(ranking_cases.run(measured_rows), "Linear")
        return shown(
            replace(section, blocks=tuple(replace(block, note="") for block in section.blocks))
            for section in sections
        )

    single = msgspec.structs.replace(
        time_row(LOW_RANK, SQUARE, ranking_cases.STEPS[LOW_RANK], phase="step"), stop="budget of 1 s"
    )
    yield (
        "Ranked by n_eff per ms; a failed, missing or single measurement has its reason",
        ranked(
            *without(without(without(rows, LOW_RANK, "latency_ns"), CORES, "noise_bytes"), FLIPPED, "step"),
            single,
            synthetic.failed(HADAMARD, SQUARE, "NaN", "quality"),
            skipped(FLIPPED, SQUARE, "no room", "step"),
        ),
    )
    yield "The best variant names the variants that it is tied with", ranked(*near())
    single = msgspec.structs.replace(single, variant=DENSE)
    yield (
        "Dense noise of a single round gives no multiples",
        ranked(*without(rows, DENSE, "latency_ns"), single),
    )
    gone = skipped(DENSE, SQUARE, "no room", "step")
    yield "Dense noise without a step gives no multiples", ranked(*without(rows, DENSE, "step"), gone)
    yield "Without dense noise multiples are absent", ranked(*(row for row in rows if row.variant != DENSE))
    ranking = ranking_cases.one_ranking(ranking_cases.run())
    chosen = [ranked_variant for ranked_variant in ranking.of(SQUARE) if ranked_variant.variant == HADAMARD]
    yield (
        "A ranking of chosen variants says that dense noise was not chosen",
        shown([ranking_section(ranking, SQUARE, chosen)]),
    )
    for rule, values in (
        (
            "One replicate below 0: the interval has no upper end",
            [1024 / x for x in (-0.1, 0.5, 0.3, 0.2, 0.1)],
        ),
        (
            "A cosine of 1 within its error ranks by its lower end",
            [1024 / x for x in (-0.02, 0.02, -0.02, 0.02)],
        ),
        ("An impossible n_eff has no rate", [-3.0, -3.0]),
        (
            "Above 100 % within the interval is about 100 %",
            [1024 / (0.7 + x) for x in (-0.3, 0.3, -0.3, 0.3)],
        ),
        ("Above 100 % beyond the interval", [1024 / (0.7 + x) for x in (-1e-3, 1e-3, -1e-3, 1e-3)]),
    ):
        noisy = ranking_cases.with_effective(*values)
        yield rule, ranked(*(row for row in noisy.rows if row.variant in {HADAMARD, DENSE}))
    large = linear(64, members=5000)
    kappa = -0.95 * 4096 / 5000
    gain = [
        time_row(ORTHOGONAL, large, *[50.0] * 6, phase="step"),
        quality_row(ORTHOGONAL, large, "kappa", "linear fitness", *[kappa] * 4),
        quality_row(ORTHOGONAL, large, "kappa", "closed form", kappa),
    ]
    for rule, sizes in (
        ("A gain that replicates do not bound is a lower end", [1 / x for x in (-1e-5, 3e-5, -1e-5, 3e-5)]),
        ("A gain that replicates confirm", [ranking_cases.effective(large, kappa)] * 4),
    ):
        n_eff = quality_row(ORTHOGONAL, large, "effective_members", "linear fitness", *sizes)
        yield rule, ranked(*gain, n_eff, *(row for row in ranking_cases.rows(large) if row.variant == DENSE))
    loop = Variant(scheme="Loop", baseline=True)
    fast = [time_row(loop, SQUARE, *[1.0] * 6, phase="step"), *ranking_cases.qualities(loop, SQUARE, 0.0)]
    more = [*rows, *fast, *ranking_cases.rows(linear(64, members=4096))]
    for rule, is_largest in (("The best at each population, no baseline", False), ("At the largest", True)):
        best = best_schemes([ranking_cases.run(more)], ["Linear"], largest_only=is_largest)
        yield rule, shown([best] if best else [])


def qualities() -> Iterator[Example]:
    """Yield tables of quality: the quality law, trained networks and other figures."""
    rows = ranking_cases.rows()
    below = [
        *without(without(rows, HADAMARD, "kappa"), LOW_RANK, "kappa"),
        *(
            quality_row(variant, SQUARE, "kappa", "linear fitness", -0.9, -0.85, -0.95)
            for variant in (HADAMARD, LOW_RANK)
        ),
        *(quality_row(variant, SQUARE, "kappa", "closed form", 0.0) for variant in (HADAMARD, LOW_RANK)),
        *(
            quality_row(variant, SQUARE, "kappa", "unseen", unseen)
            for variant, unseen in ((HADAMARD, 300.0), (LOW_RANK, 0.01))
        ),
        quality_row(ORTHOGONAL, SQUARE, "kappa", "linear fitness", 0.5),
    ]
    below = without(below, CORES, "correlation")
    below.append(skipped(CORES, SQUARE, "one layer", "quality", method="layers"))
    (law,) = [s for s in quality_sections(ranking_cases.run(below), "Linear") if "quality of" in s.title]
    yield "Fitted kappa beside its closed form: it holds, is unclear, or is contradicted", shown([law])
    run = ranking_cases.run(ranking_cases.digits(SQUARE))
    yield (
        "A trained network has a cosine for each sigma, in their order",
        shown(quality_sections(run, "DigitsMLP")),
    )
    plain, absent = variant("DenseDigits"), variant("Trained", rule="set")
    rigl = variant("Trained", rule="rigl")
    figures: list[Row] = [
        quality_row(plain, msgspec.structs.replace(DIGITS, in_channels=128), "accuracy", "test digits", 0.99),
        quality_row(plain, DIGITS, "accuracy", "test digits", 0.98, 0.98),
        quality_row(rigl, DIGITS, "accuracy", "test digits", 0.97, 0.98, 0.96),
        quality_row(rigl, DIGITS, "nonzero_count", "weights", 2587, 2587),
        quality_row(rigl, DIGITS, "live_gradient_bytes", "step", 4e6),
        quality_row(rigl, DIGITS, "live_gradient_bytes", "topology step", 5e6),
        skipped(absent, DIGITS, phase="quality", reason="it has no digits"),
    ]
    run = ranking_cases.run(figures)
    yield (
        "Other figures have their units and intervals, cases by size",
        shown(quality_sections(run, "SparseDigits")),
    )


def advice() -> Iterator[Example]:
    """Yield examples of recommendations, and of the reason why time alone misleads."""
    rows = ranking_cases.rows()
    exact = linear(64, members=4096)
    with_exact = [*ranking_cases.rows(exact), *ranking_cases.orthogonal(exact)]
    fast = ranking_cases.rows(steps={**ranking_cases.STEPS, HADAMARD: 0.5})
    no_peak = without(rows, CORES, "peak_bytes")
    alone = [row for row in rows if row.variant in {DENSE, BASE}]
    bound = ranking_cases.with_effective(*[1024 / x for x in (-0.02, 0.02, -0.02, 0.02)]).rows
    for rule, measured_rows, case, limit_bytes, part in (
        ("The best, what it gives over dense noise, and what the fastest loses", rows, SQUARE, None, Part()),
        ("A layer of a network is ranked with the network's d", rows, SQUARE, None, Part(4096, 40960)),
        ("An exact estimate is best", with_exact, exact, None, Part()),
        ("A lower bound of n_eff is best", bound, SQUARE, None, Part()),
        ("Dense noise is not compared with itself", alone, SQUARE, None, Part()),
        ("A tie is named", near(), SQUARE, None, Part()),
        ("The fastest is best", fast, SQUARE, None, Part()),
        ("Above a memory limit, or of unknown memory", no_peak, SQUARE, 1.5e6, Part()),
        ("No variant fits", rows, SQUARE, 1.0, Part()),
    ):
        recommended = recommend([ranking_cases.run(measured_rows)], case, limit_bytes=limit_bytes, part=part)
        assert recommended
        shown = [
            recommendation.answer(recommended),
            recommendation.figures([recommended], lambda variant: f"99 ({variant.name})"),
            recommendation.remarks(recommended),
        ]
        yield rule, "```text\n{}\n```\n".format("\n\n".join(filter(None, shown)))


def winner(variant: Variant) -> RankedVariant:
    """Return a variant that was best."""
    return RankedVariant(variant, msgspec.structs.replace(linear(members=64), sigma=0.05))


def code() -> Iterator[Example]:
    """Yield examples of code that trains with the best variants."""
    permuted, theirs = variant("Permuted", side="out", out_sparsity=0.5), variant("Theirs")
    several = {"a[0]": winner(LOW_RANK), "b*": winner(HADAMARD), "c": winner(LOW_RANK)}
    modules = {permuted: "impls", LOW_RANK: "impls", HADAMARD: "plugin_of_theirs"}
    for rule, text in (
        ("One scheme with its options", training_code({"": winner(permuted)}, modules)),
        (
            "Layers with another winner have their own patterns; the most frequent scheme is last",
            training_code(several, modules, exclude=["table?"]),
        ),
        ("A scheme that is not registered", training_code({"": winner(theirs)}, modules)),
        (
            "An update from rows needs the layers' inputs",
            training_code({"": winner(HADAMARD)}, modules, from_rows=[HADAMARD]),
        ),
    ):
        compile(text, rule, "exec")
        yield rule, f"```text\n{text}\n```\n"


def pairs() -> Iterator[Example]:
    """Yield examples of two runs compared."""
    forward = [time_row(variant, SMALL, *[1.0] * 8) for variant in (BASE, DENSE)]
    counts = [bytes_row(v, SMALL, name, 1000) for name in ("peak_bytes", "launches") for v in (BASE, DENSE)]
    wide = time_row(SPARSE, SMALL, 1.0, 1.1, 1.0, 1.0, 0.9, 1.0, 1.0)
    few = time_row(CORES, SMALL, 1, 1)
    a = [*synthetic.replaced(forward, phase="sample"), *forward, *counts, wide, few]
    a += [time_row(NAIVE, SMALL, 2), time_row(FLIPPED, SMALL, 1)]
    b = [
        *synthetic.replaced(
            [time_row(variant, SMALL, *[3.0] * 8) for variant in (BASE, DENSE)], phase="sample"
        ),
        forward[0],
        time_row(DENSE, SMALL, *[2.0] * 8),
        *counts[:1],
        bytes_row(DENSE, SMALL, "peak_bytes", 1500),
        *counts[2:],
        time_row(SPARSE, SMALL, 2.0, 2.2, 2.0, 2.0, 1.8, 2.0, 2.0),
        few,
        skipped(NAIVE, SMALL, "no room"),
        time_row(FLIPPED, SMALL, 1),
        synthetic.failed(FLIPPED, SMALL, "wrong"),
        time_row(DENSE, LARGE, 1),
    ]
    later_run = synthetic.changed(synthetic.run(b, run_id="20260102T000000Z-quick-0002"), torch="2.14.0")
    text = comparison.text(compare(synthetic.run(a), later_run))
    yield (
        "Two runs: what grew most first, counts that differ, and rows of one run only",
        f"```text\n{text}```\n",
    )
