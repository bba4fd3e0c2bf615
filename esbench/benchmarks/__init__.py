"""The variants as tests of pytest-benchmark.

This module is a plugin of pytest, which adds the options; the tests are beside it. So it is named twice, from
whichever folder:

    pytest -p esbench.benchmarks --pyargs esbench.benchmarks --esbench-phases forward --benchmark-autosave
"""

import pytest

from esbench.benchmarks.options import FRONT, Choice
from esbench.errors import UserError

NEEDS = "esbench.benchmarks needs pytest-benchmark: pip install 'pytest-benchmark[histogram]'"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `esbench run`, each with the prefix ``--esbench``."""
    group = parser.getgroup("esbench", "variants of esbench, as benchmarks")
    group.addoption(
        "--esbench-suite", metavar="NAME", help="Suite; by default readme on a GPU and quick on a CPU."
    )
    group.addoption("--esbench-device", metavar="NAME", default="auto", help="auto, cpu or cuda.")
    group.addoption(
        "--esbench-variants",
        metavar="GLOB",
        action="append",
        default=[],
        help="Glob over names (Permuted*) or labels (PermutedLinear*); repeatable.",
    )
    group.addoption(
        "--esbench-cases", metavar="GLOB", default="*", help="Glob over case labels, such as 'Linear*'."
    )
    group.addoption(
        "--esbench-phases",
        metavar="NAMES",
        default="",
        help="Comma-separated: sample, forward, update, step; and quality: kappa and n_eff beside them.",
    )
    group.addoption(
        "--esbench-plugin",
        metavar="NAME",
        action="append",
        default=[],
        help="Module, or file ending in .py, that registers variants; repeatable.",
    )
    group.addoption(
        "--esbench-seed", metavar="NUMBER", type=int, default=0, help="Seed of weights, inputs and noise."
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Choose what is benchmarked, before anything is collected.

    Raises:
        pytest.UsageError: pytest-benchmark is not installed, or a name is unknown.

    """
    from esbench.benchmarks.session import Front  # noqa: PLC0415  # torch: `pytest --help` does without

    config = session.config
    if not config.pluginmanager.hasplugin("benchmark"):
        raise pytest.UsageError(NEEDS)
    choice = Choice(
        suite=config.getoption("esbench_suite"),
        device=config.getoption("esbench_device"),
        variants=tuple(config.getoption("esbench_variants")),
        cases=config.getoption("esbench_cases"),
        phases=config.getoption("esbench_phases"),
        plugins=tuple(config.getoption("esbench_plugin")),
        seed=config.getoption("esbench_seed"),
    )
    try:
        config.stash[FRONT] = Front.of(choice)
    except UserError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, object]) -> None:
    """Put what a run's header says of the machine, the GPU among it, into what pytest-benchmark stores.

    They are kept apart from its own description of the machine, which it compares between runs.
    """
    if FRONT in config.stash:
        output_json["esbench"] = config.stash[FRONT].machine
