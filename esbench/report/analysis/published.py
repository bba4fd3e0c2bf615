"""Published figures, read from CSV files as runs, so that the same tables show them.

``results/published/README.md`` says what they are. Names of variants are translated into ours, figures are
unchanged. The method of their rows is ``published``.
"""

import ast
import csv
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from esbench.errors import UserError
from esbench.schema import (
    SCHEMA_VERSION,
    Case,
    Environment,
    Measurement,
    Run,
    RunEnd,
    RunHeader,
    Scalar,
    Variant,
)
from esbench.store import Problem

PUBLISHED = "published"
"""The method of figures from publications."""
_MS = 1e6
_UNKNOWN = "not published"


def _ours(scheme: str, **options: Scalar) -> Variant:
    return Variant(scheme=scheme, options=tuple(options.items()))


_BASE = Variant(scheme="Base", mode="base", baseline=True)
# Plain permutations of the sources are of outputs; ours are of inputs by default. The draft does not say
# which side `Sign flip` flips: it must not be taken for a variant of ours, which has a side.
_VARIANTS = {
    "Base": _BASE,
    "Naive": Variant(scheme="Naive", mode="naive", baseline=True),
    **dict.fromkeys(("PerturbedLinear", "PerturbedConv2d", "IID", "Antithetic"), _ours("Perturbed")),
    "SparsePerturbedLinear (k=1)": _ours("SparsePerturbed", k=1),
    "SparsePerturbedLinear (k=2)": _ours("SparsePerturbed", k=2),
    **dict.fromkeys(("PermutedLinear", "PermutedConv2d", "Permutation"), _ours("Permuted", side="out")),
    "PermutedLinear(in_sparsity=.5)": _ours("Permuted", in_sparsity=0.5),
    "PermutedLinear(in_sparsity=.1)": _ours("Permuted", in_sparsity=0.1),
    "PermutedConv2d(out_sparsity=.5)": _ours("Permuted", side="out", out_sparsity=0.5),
    "PermutedConv2d(out_sparsity=.1)": _ours("Permuted", side="out", out_sparsity=0.1),
    "Permutation(sparsity=.5)": _ours("Permuted", side="out", out_sparsity=0.5),
    "Permutation(sparsity=.1)": _ours("Permuted", side="out", out_sparsity=0.1),
    "Sign flip": _ours("Flipped", side="unknown"),
}


def read_published(path: Path) -> Run:
    """Read a file of published figures.

    Raises:
        UserError: the file, or the named line of it, cannot be read.

    """
    rows: list[Measurement] = []
    base_ms: dict[Case, float] = {}
    number = 1
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file, strict=True))
        for number, line in enumerate(lines, start=2):
            rows += _rows(line, base_ms, number)
        return _run(path.stem, lines[0]["source"], lines[0]["device"], rows)
    except (OSError, ValueError, SyntaxError, LookupError, TypeError, csv.Error) as error:
        message = f"{path}:{number} is not a published figure: {type(error).__name__}: {error}"
        raise UserError(" ".join(message.split())) from error


def read_all_published(folder: Path) -> tuple[list[Run], list[Problem]]:
    """Read every file of published figures in a folder, in the order of their names."""
    runs: list[Run] = []
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.csv")):
        try:
            runs.append(read_published(path))
        except UserError as error:
            problems.append(Problem(folder, str(error)))
    return runs, problems


def _rows(line: Mapping[str, str], base_ms: dict[Case, float], number: int) -> list[Measurement]:
    """Return the measurement in a line; an antithetic forward also gets the Base of its case.

    ``base_ms`` holds the times of Base on the lines above, which multiples of Base are relative to.
    """
    case, name = _case(line), line["variant"]
    ms = float(line["time_ms"]) if line["time_ms"] else float(line["multiple_of_base"]) * base_ms[case]
    if not (math.isfinite(ms) and ms > 0):
        message = f"time_ms is {ms:g}, not a time"
        raise ValueError(message)
    if name == "Base":
        base_ms[case] = ms
    # Which figures were measured together is unknown: a group for each, so that no two share their rounds.
    fields = {"case": case, "phase": line["phase"], "metric": "latency_ns", "method": PUBLISHED}
    row = msgspec.convert(
        fields | {"variant": _VARIANTS[name], "samples": [[ms * _MS]], "group": number}, Measurement
    )
    if name != "Antithetic":
        return [row]
    paired = msgspec.structs.replace(case, members=case.members // 2, repeats=2, antithetic=True)
    row = msgspec.structs.replace(row, case=paired)
    if row.phase != "forward" or case not in base_ms:
        return [row]
    samples = ((base_ms[case] * _MS,),)
    return [row, msgspec.structs.replace(row, variant=_BASE, samples=samples, group=-number)]


def _case(line: Mapping[str, str]) -> Case:
    """Return the case: (out, in) and for convolutions also kernel and input."""
    out_channels, in_channels, *space = ast.literal_eval(line["shape"])
    kernel_size, input_size = space or ((), ())
    case = {
        "operator": line["layer"],
        "out_channels": out_channels,
        "in_channels": in_channels,
        "kernel_size": kernel_size,
        "input_size": input_size,
        "members": int(line["batch_size"]),
        "dtype": line["dtype"],
        # The draft padded its 3x3 filters, the NESgpu README did not.
        "padding": 1 if kernel_size and "multiple_of_base" in line else 0,
    }
    return msgspec.convert(case, Case)


def _run(run_id: str, source: str, device: str, rows: list[Measurement]) -> Run:
    environment = Environment(
        device="cuda",
        device_name=device,
        cpu=_UNKNOWN,
        threads=0,
        memory_bytes=0,
        platform=_UNKNOWN,
        python=_UNKNOWN,
        torch=_UNKNOWN,
        esbench=_UNKNOWN,
    )
    header = RunHeader(
        schema=SCHEMA_VERSION, run_id=run_id, suite=source, started="", seed=0, environment=environment
    )
    return Run(header=header, rows=tuple(rows), end=RunEnd(status="complete", wall_s=0.0))
