"""Source rules that no linter checks: light imports, schemes independent of operators, stated reasons."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPERATORS = {"Linear", "Conv1d", "Conv2d", "Conv3d", "linear", "conv1d", "conv2d", "conv3d"}
DIRECTIVE = re.compile(r"#\s*(?:noqa(?::\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?|type:\s*ignore(?:\[[^]]*\])?)(.*)")

TIMER = re.compile(
    r"^time as |^time\.time(_ns)?$|\.(monotonic|perf_counter|process_time|thread_time)(_ns)?$|^timeit\b"
    r"|\butils\.benchmark\b|\bdo_bench|\bcuda\.Event$|^esbench\.measure\b"
)


def test_reading_loads_no_torch() -> None:
    """Reading runs imports no torch; the command line imports no torch, pandas or matplotlib."""
    reading = loaded_by("import esbench.report, esbench.store, esbench.registry, esbench.gate.decision")
    assert "torch" not in reading
    light = loaded_by("import esbench.cli, esbench.report.analysis.history")
    assert not light & {"torch", "pandas", "matplotlib", "ruptures", "scipy"}
    assert "esbench" in reading  # the list has the imported modules


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after a statement."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_a_scheme_names_no_operator() -> None:
    """A scheme is the same mathematics on every operator, so its code must not name any."""
    schemes = [path for path in ROOT.glob("impls/schemes/*.py") if "@variant" in path.read_text()]
    assert schemes
    for path in schemes:
        assert not list(named_operators(path.read_text())), path
    for planted in (
        "isinstance(op, operators.Conv2d)",
        "from torch.nn.functional import conv2d",
        "type(op).__name__ == 'Linear'",
    ):
        assert list(named_operators(planted)) == [1]
    assert not list(named_operators('"""Linear layers."""'))


def named_operators(source: str) -> Iterator[int]:
    """Yield the lines of names, imports and whole strings that name an operator."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=name)
            ) if isinstance(name, str) and name.rpartition(".")[2] in OPERATORS:
                yield getattr(node, "lineno", 1)


def test_implementations_are_timed_by_the_harness_alone() -> None:
    """No module of the implementations uses a clock, except for those listed here with a reason."""
    allowed = {
        # Times kernels to select their launch options.
        "impls/kernels/autotune.py": {"triton.testing.do_bench_cudagraph", "time.monotonic"},
        # Starts fresh processes that report their times.
        "impls/benchmark/training/memory_reclaim.py": {"time.perf_counter_ns"},
        "impls/benchmark/training/shared_compile.py": {"time.perf_counter_ns"},
    }
    paths = list(ROOT.glob("impls/**/*.py"))
    assert len(paths) > 50
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        assert set(timers(path.read_text())) == allowed.get(name, set()), name
    for planted in (
        "import time\nstart = time.perf_counter()",
        "import time as clock\nclock.time()",
        "from time import monotonic",
        "def late():\n    import timeit",
        "from torch.utils import benchmark",
        "torch.utils.benchmark.Timer('f()')",
        "torch.cuda.Event(enable_timing=True)",
        "from esbench.measure.run import measure",
        "from esbench import measure",
    ):
        assert list(timers(planted)), planted
    assert not list(timers("import time\ntime.sleep(1)\nfrom esbench.registry import suite"))


def timers(source: str) -> Iterator[str]:
    """Yield the clocks and timers that a source imports or names."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found = [ast.unparse(one) for one in names]
            case ast.ImportFrom(module=str(module), names=names):
                found = [f"{module}.{one.name}" for one in names]
            case ast.Attribute():
                found = [ast.unparse(node)]
            case _:
                continue
        yield from filter(TIMER.search, found)


def test_files_that_sessions_name_exist() -> None:
    """Every test file and folder named by a session of noxfile.py exists."""
    named = set(re.findall(r'"(tests/[\w./]+)"', (ROOT / "noxfile.py").read_text()))
    assert len(named) > 3
    assert not {path for path in named if not (ROOT / path).exists()}


def test_on_a_gpu_warnings_of_torch_and_triton_are_no_errors() -> None:
    """Both ways to run the GPU tests reset pytest's warning filter to its default."""
    session = (ROOT / "noxfile.py").read_text().partition("def tests_gpu")[2].partition("@nox.session")[0]
    script = (ROOT / "tools" / "gpu_session.sh").read_text().partition("\ntests() {")[2].partition("\n}")[0]
    assert '"-W", "default"' in session
    assert "-W default" in script


def test_an_exception_gives_its_reason() -> None:
    """Each noqa, type: ignore, skip, xfail and broad except has its reason on its line."""
    paths = [
        path for folder in ("esbench", "impls", "examples", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    found = {f"{path}:{line}" for path in paths for line in unexplained(path.read_text())}
    assert not found
    mark, silence = "pytest.mark.skip", "# no" + "qa: E501"
    for planted in (
        f"x = 1  {silence}",
        f"@{mark}\ndef f(): pass",
        "try:\n    f()\nexcept Exception:\n    pass",
    ):
        assert list(unexplained(planted)), planted
    assert not list(unexplained(f"x = 1  {silence}  a table of numbers"))
    assert not list(unexplained(f"@{mark}(reason='no such device')\ndef f(): pass"))


def unexplained(source: str) -> Iterator[int]:
    """Yield the lines that silence a check, skip a test or catch everything without a reason."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        directive = DIRECTIVE.search(token.string) if token.type == tokenize.COMMENT else None
        if directive and not re.search(r"\w", directive[1]):
            yield token.start[0]
    with_reason = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute() as func, args=args, keywords=keywords):
                named = any(keyword.arg == "reason" for keyword in keywords)
                if named or (args and ".mark." not in ast.unparse(func)):
                    with_reason.add(id(func))
            case ast.ExceptHandler(type=caught) if caught is None or is_broad(caught):
                if not re.search(r"#.*\w", lines[node.lineno - 1]):
                    yield node.lineno
            case ast.Attribute(attr="skip" | "skipif" | "xfail") if id(node) not in with_reason:
                if ast.unparse(node).startswith("pytest."):
                    yield node.lineno


def is_broad(caught: ast.expr) -> bool:
    """Return whether an except clause catches Exception or BaseException, alone or in a tuple."""
    return any(getattr(node, "id", "") in {"Exception", "BaseException"} for node in ast.walk(caught))
