"""The tasks of this repository: `nox -l` lists them, `nox -s NAME` runs one.

Plain `nox` runs the sessions marked with a star. Arguments after `--` go to the program that the session
runs: `nox -s tests -- -k oracle`, `nox -s bench -- --device cpu`. Environments are kept; a session installs
again only if pyproject.toml or constraints.txt changed.
"""

import hashlib
import runpy
import shutil
from pathlib import Path

import nox
from packaging.utils import canonicalize_name

nox.options.default_venv_backend = "virtualenv"  # pip's configuration decides which torch is installed
nox.options.reuse_venv = "yes"

CONSTRAINTS = Path("constraints.txt")
PYPROJECT = nox.project.load_toml("pyproject.toml")
DEPENDENCIES: list[str] = PYPROJECT["project"]["dependencies"]
PROJECT = ("-e", ".")
WORKERS = ("-n", "logical", "--maxprocesses", "8", "--dist", "loadgroup")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For pytest's workers, which would only compete with each other for more."""
MEASURING = runpy.run_path("esbench/wheels.py")["MEASURING"]
"""The dependencies of measuring; the others are for reports."""
READING = [name for name in DEPENDENCIES if not name.startswith("torch")]


@nox.session
def tests(session: nox.Session) -> None:
    """Run all tests that need no GPU, on as many cores as there are, up to eight."""
    install(session, *PROJECT, *group("test"))
    session.run("python", "-m", "pytest", *WORKERS, *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def tests_gpu(session: nox.Session) -> None:
    """Run the tests in tests/gpu, and those of kernels, on this machine's CUDA GPU."""
    install(session, *PROJECT, *group("test"))
    available = session.run(
        "python", "-c", "import torch; print(torch.cuda.is_available())", silent=True, log=False
    )
    if str(available).strip() != "True":
        session.error("tests_gpu needs a CUDA GPU, and torch finds none on this machine")
    # Tests that measure run alone. Deprecation warnings of torch and triton are no errors here.
    run = ("python", "-m", "pytest", "-W", "default")
    parallel = ("-n", "logical", "--maxprocesses", "14", "tests/gpu", "tests/kernels/launched")
    for selection in (("-m", "alone", "tests/gpu"), ("-m", "not alone", *parallel)):
        session.run(*run, *selection, *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def studies(session: nox.Session) -> None:
    """Run the tests in tests/studies, which take minutes or compare times; they print their results."""
    install(session, *PROJECT, *group("test"))
    session.run("python", "-m", "pytest", "-s", "tests/studies", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style with ruff and imports with import-linter; `ruff check --fix` repairs most of it."""
    install(session, *group("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")
    session.run("lint-imports", env={"PYTHONPATH": "."})


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy --strict."""
    install(session, *PROJECT, *group("types"))
    session.run("mypy", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure, store the run under results/ and render build/reports/; without a GPU a quick suite.

    Git ignores both: CONTRIBUTING.md says how to publish a run.
    """
    install(session, *PROJECT)
    try:
        session.run("python", "-m", "esbench", "run", *session.posargs)
    finally:  # also if one variant failed
        session.run("python", "-m", "esbench", "report")


@nox.session(default=False)
def pytest_bench(session: nox.Session) -> None:
    """Benchmark every variant with pytest-benchmark; `-- --benchmark-autosave` stores the result."""
    install(session, *PROJECT, *group("bench"))
    session.run(
        # Without the pytest settings in pyproject.toml, which are for the tests.
        *("python", "-m", "pytest", "-o", "addopts=", "-W", "default"),
        *("-p", "esbench.pytest_plugin", "--pyargs", "esbench.pytest_benchmarks"),
        *("--benchmark-max-time", "0.2", "--benchmark-disable-gc"),
        *session.posargs,
    )


@nox.session(default=False)
def accuracy(session: nox.Session) -> None:
    """Compare the harness with torch.utils.benchmark and with itself; writes build/reports/accuracy.md."""
    install(session, *PROJECT)
    session.run("python", "-m", "esbench", "accuracy", *session.posargs)


@nox.session(default=False)
def digits(session: nox.Session) -> None:
    """Train handwritten digits with every variant; writes build/reports/digits.md."""
    install(session, *PROJECT)
    session.run("python", "-m", "esbench", "digits", *session.posargs)


@nox.session(default=False)
def scaling(session: nox.Session) -> None:
    """Time training over 1, 2 and 4 processes in a minute; writes build/reports/scaling.md."""
    install(session, *PROJECT)
    session.run("python", "-m", "esbench", "scaling", *session.posargs)


@nox.session(default=False)
def peers(session: nox.Session) -> None:
    """Measure a generation by esbench and by other libraries (docs/peers.md), and render build/reports/."""
    install(session, *PROJECT, *group("peers"))
    try:
        session.run("python", "-m", "esbench", "run", "--suite", "peers", *session.posargs)
    finally:  # also if one variant failed
        session.run("python", "-m", "esbench", "report")


@nox.session(default=False)
def tasks(session: nox.Session) -> None:
    """Train four tasks until a goal with six schemes, in half an hour; writes build/reports/tasks.md."""
    install(session, *PROJECT, *group("tasks"))
    session.run("python", "-m", "esbench", "tasks", *session.posargs)


@nox.session(default=False)
def gate(session: nox.Session) -> None:
    """Compare this revision with the merge base, or with `-- --base REV`: is it slower, larger or wrong?"""
    install(session, *PROJECT)
    session.run("python", "-m", "esbench", "gate", *session.posargs)


@nox.session(default=False)
def gate_study(session: nox.Session) -> None:
    """Measure false alarms and power of the gate in ten minutes; writes build/reports/gate.md."""
    install(session, *PROJECT)
    session.run("python", "-m", "esbench", "gate-study", *session.posargs)


@nox.session(default=False)
def kernels(session: nox.Session) -> None:
    """Compile every kernel for capability 8.0 and 9.0 without a GPU, and run all their tests interpreted.

    Prints registers and shared memory, and compares them with the record in impls/kernels/compiled.json.
    """
    install(session, *PROJECT, *group("test"))
    session.run("python", "-m", "impls.kernels.compile_checks", *session.posargs)
    session.run("python", "-m", "impls.kernels.compile_checks", "--candidates")
    interpreted = ("-W", "ignore::DeprecationWarning:triton.runtime.interpreter", "tests/kernels/launched")
    session.run("python", "-m", "pytest", *interpreted, env={"TRITON_INTERPRET": "1"})


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """Run the kernels' tests under CUDA's compute-sanitizer: nothing out of bounds, no race."""
    if not shutil.which("compute-sanitizer"):
        session.error("sanitize needs compute-sanitizer, which comes with the CUDA toolkit, and a CUDA GPU")
    install(session, *PROJECT, *group("test"))
    for tool in ("memcheck", "racecheck"):
        session.run(
            *("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--target-processes", "all"),
            *("python", "-m", "pytest", "tests/kernels/launched", *session.posargs),
            external=True,
            # A caching allocator would hide out-of-bounds accesses.
            env={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )


@nox.session(default=False)
def tune(session: nox.Session) -> None:
    """Find the fastest tile sizes of the kernels on this machine's CUDA GPU; writes a table to be committed.

    `-- --seconds 200` stops after this time, and another call continues.
    """
    install(session, *PROJECT, *group("test"))
    session.run("python", "-m", "impls.kernels.autotune", *session.posargs)


@nox.session(default=False)
def examples(session: nox.Session) -> None:
    """Run the scripts of examples/, each under a minute; `-- digits_mlp --steps 300` runs one of them."""
    install(session, *PROJECT, *group("tasks"))
    name, *options = session.posargs or ("*",)
    for script in sorted(Path("examples").glob(f"{name}.py")):
        if "__main__" in script.read_text(encoding="utf-8"):
            session.run("python", str(script), *options)


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Render results/ into build/reports/, `-- --publish` into reports/; needs no torch."""
    install(session, *READING)
    session.run("python", "-m", "esbench", "report", *session.posargs)


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """Test the report page in a browser.

    Needs a Chromium of the system, for instance from `apt-get install chromium`.
    """
    install(session, *PROJECT, *group("browser"))
    session.run(
        *("python", "-m", "pytest", "tests/browser", *session.posargs),
        env={"ESBENCH_BROWSER": "required"},  # without a browser these tests fail instead of being skipped
    )


@nox.session(default=False)
def readme(session: nox.Session) -> None:
    """Regenerate the marked parts of the README; `-- --check` only checks that they are up to date."""
    install(session, *READING)
    session.run("python", "-m", "esbench", "readme", *session.posargs)


@nox.session(default=False)
def minimums(session: nox.Session) -> None:
    """Run the tests with the oldest releases allowed; torch stays as pinned unless `-- torch` is given.

    The oldest torch is not the default because many machines download several GB of CUDA with it.
    """
    pinned = [] if "torch" in session.posargs else ["torch", "triton"]  # each torch needs its own triton
    bounded = [*DEPENDENCIES, *(name.partition(";")[0] for name in group("test") if ">=" in name)]
    lowest = dict(requirement.split(">=") for requirement in bounded)
    replaced = {canonicalize_name(name) for name in lowest if name not in pinned}
    lines = [
        line
        for line in CONSTRAINTS.read_text().splitlines()
        if canonicalize_name(line.partition("==")[0]) not in replaced
    ]
    lines += [f"{name}=={version}" for name, version in lowest.items() if name not in pinned]
    # session.create_tmp() would move the temporary folders of tests into this repository.
    constraints = Path(session.virtualenv.location) / "minimums.txt"
    constraints.write_text("\n".join(lines) + "\n")
    install(session, *PROJECT, *group("test"), constraints=constraints)
    # Old releases may warn about newer ones.
    session.run("python", "-m", "pytest", "-W", "default", *WORKERS, env=ONE_THREAD)


@nox.session(default=False, python="3.12")
def oldest(session: nox.Session) -> None:
    """Measure with the oldest releases allowed, including torch, and without packages that only reports need.

    The project is not installed, as on a rented GPU. On Linux pip downloads the CUDA build of torch, several
    GB, which also runs without a GPU.
    """
    lowest = [name.replace(">=", "==") for name in DEPENDENCIES if name.partition(">=")[0] in MEASURING]
    session.install(*lowest, "pytest")
    folder = Path(session.virtualenv.location).resolve()

    def python(*arguments: str, **variables: str) -> None:
        session.run("python", *arguments, env={"PYTHONPATH": str(Path.cwd()), **variables})

    python("-c", "import esbench, impls")
    python("-m", "esbench", "doctor")
    selection = ("--variants", "LowRank(rank=1)", "--cases", "Linear*", "--phases", "forward,update")
    python(
        "-m", "esbench", "run", "--suite=gate", "--device=cpu", *selection, "--results", f"{folder}/results"
    )
    python(
        *("-m", "pytest", "-o", "addopts=", "-W", "default", "-p", "no:cacheprovider"),
        *("tests/kernels/launched/test_products.py", "tests/kernels/launched/test_drawn_noise.py"),
        TRITON_INTERPRET="1",
    )
    python("-m", "impls.kernels.compile_checks", "--capability=90")


def group(name: str) -> tuple[str, ...]:
    """Return the requirements of a dependency group of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, name)


def install(session: nox.Session, *requirements: str, constraints: Path = CONSTRAINTS) -> None:
    """Install requirements with the pinned versions, unless the environment already has exactly these."""
    texts = (Path("pyproject.toml").read_text(), constraints.read_text(), *requirements)
    checksum = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed.sha256"
    if stamp.exists() and stamp.read_text() == checksum:
        session.log("nothing to install: pyproject.toml and constraints.txt have not changed")
        return
    session.install("-c", str(constraints), *requirements)
    stamp.write_text(checksum)
