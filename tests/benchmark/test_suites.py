"""The suites included in the package."""

import itertools
import math
from collections import Counter
from fnmatch import fnmatchcase

import msgspec

from esbench.gate.records import Cell
from esbench.registry import REGISTRY, entries_of_suite, load, select_cases
from esbench.studies import kernels
from impls.benchmark import inputs
from impls.training.networks import NETWORKS

load("impls")


def test_suites_select_what_their_descriptions_say() -> None:
    """Globs match in any dtype, sweeps ascend by powers of two, and capacity exceeds any device."""
    operators = {"Linear", "Conv2d", *inputs.PACKED, *NETWORKS, *REGISTRY.reserved}
    for suite in REGISTRY.suites.values():
        assert {case.operator for case in suite.cases} <= operators
        REGISTRY.select(suite.variants)
        for dtype in ("float32", "bfloat16"):
            cases = [msgspec.structs.replace(case, dtype=dtype) for case in suite.cases]
            for glob in suite.active:
                assert select_cases(cases, glob)
    for name in ("population", "width"):
        sweep = REGISTRY.find_suite(name)
        steps = [getattr(case, sweep.sweep) for case in sweep.cases]
        assert all(later == 2 * earlier for earlier, later in itertools.pairwise(steps))
        assert math.isfinite(sweep.stop_s)
    readme = REGISTRY.find_suite("readme")
    active = [case.label for glob in readme.active for case in select_cases(readme.cases, glob)]
    assert active == ["Linear(1024, 1024)"]
    measured = {entry.variant.name for entry in REGISTRY.select(readme.variants)}
    assert len({*readme.active_variants} & measured) == len(readme.active_variants) == 4
    (case,) = REGISTRY.find_suite("capacity").cases
    assert case.members * case.out_channels * case.in_channels * 4 > 10**12


def test_a_gate_times_one_variant_of_each_scheme_in_at_most_60_cells() -> None:
    """Each scheme of layers is timed on a linear layer, in all phases or in two by a graph."""
    for name, method, phases in (("gate", "host", 3), ("gate_cuda", "graph", 2)):
        suite = REGISTRY.find_suite(name)
        entries = [
            entry
            for entry in entries_of_suite(REGISTRY.select(), suite, ())
            if not entry.variant.baseline and any(map(entry.supports, suite.cases))
        ]
        timed = [
            (entry.variant.scheme, case.operator)
            for case, entry, phase in itertools.product(suite.cases, entries, suite.phases)
            if entry.supports(case)
            # Other schemes support no binarized layer, which is found only when one is set up.
            and (case.operator != "BinarizedLinear" or entry.variant.scheme.startswith("Binary"))
            and any(fnmatchcase(Cell(entry.variant, case, phase, method).name, glob) for glob in suite.timed)
        ]
        assert len(timed) <= 60
        of_linear = Counter(scheme for scheme, operator in timed if operator.endswith("Linear"))
        assert of_linear == {entry.variant.scheme: phases for entry in entries}


def test_every_goal_of_a_kernel_is_measured_by_a_suite() -> None:
    """Each goal is for a registered variant, on a case of a suite that the kernels page shows."""
    measured = {
        (entry.variant.name, case.label, phase)
        for name in kernels.SUITES
        for suite in [REGISTRY.suites[name]]
        for entry in REGISTRY.select(suite.variants)
        for case in suite.cases
        for phase in suite.phases
    }
    assert {(goal.variant, goal.case, goal.phase) for goal in kernels.GOALS} <= measured
