"""Published figures, read from CSV files as runs, so that the same tables show them.

``results/published/README.md`` says what they are. Names of variants are translated into ours, figures are
unchanged. The method of their rows is ``published``.
"""

import ast
import csv
import math
import re
from pathlib import Path

import msgspec

from esbench.schema import (
    SCHEMA_VERSION,
    Case,
    Environment,
    Measurement,
    Phase,
    Run,
    RunEnd,
    RunHeader,
    Scalar,
    Variant,
)
from esbench.store import Problem

PUBLISHED = "published"
"""The method of figures from publications."""
_COLUMNS = ("source", "device", "dtype", "batch_size", "phase", "layer", "shape", "variant", "time_ms")
_MS = 1e6
_UNKNOWN = "not published"
# Sources name no side for their plain `PermutedLinear`, `PermutedConv2d` and `Permutation`; they
# permuted outputs, our default are inputs. Which side `Sign flip` flips, the draft does not say: it
# must not pass for a variant of ours that has a side.
_SCHEMES: dict[str, tuple[str, dict[str, Scalar]]] = {
    "Perturbed": ("Perturbed", {}),
    "SparsePerturbed": ("SparsePerturbed", {}),
    "Permuted": ("Permuted", {"side": "out"}),
    "IID": ("Perturbed", {}),
    "Antithetic": ("Perturbed", {}),
    "Sign flip": ("Flipped", {"side": "unknown"}),
    "Permutation": ("Permuted", {"side": "out"}),
}
_OPTIONS = {"sparsity": "out_sparsity"}
_FIELD_ORDER = ("k", "side", "in_sparsity", "out_sparsity")


def read_published(path: Path) -> tuple[Run | None, list[Problem]]:
    """Read a file of published figures; a line that cannot be understood is a problem with its number."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns = reader.fieldnames or ()
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        return None, [Problem(path, f"cannot be read as CSV: {error}")]
    missing = [name for name in _COLUMNS if name not in columns]
    if missing:
        return None, [Problem(path, f"lacks the columns {', '.join(missing)}", 1)]
    problems: list[Problem] = []
    rows: list[Measurement] = []
    base: dict[Case, float] = {}
    for number, line in lines:
        try:
            rows += _rows(line, base, number)
        except ValueError as error:
            problems.append(Problem(path, f"not a published figure: {error}", number))
    if not rows:
        return None, problems or [Problem(path, "holds no figures")]
    first = lines[0][1]
    return _run(path.stem, first["source"], first["device"], rows), problems


def read_all_published(folder: Path) -> tuple[list[Run], list[Problem]]:
    """Read every file of published figures in a folder, in the order of their names."""
    runs: list[Run] = []
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.csv")):
        run, found = read_published(path)
        runs += [run] if run else []
        problems += found
    return runs, problems


def _rows(line: dict[str, str], base: dict[Case, float], number: int) -> list[Measurement]:
    """The measurement of a line; an antithetic one also gets the Base of its case, with as many rows."""
    if None in line or None in line.values():
        message = "its number of columns differs from that of the first line"
        raise ValueError(message)
    case = _case(line)
    milliseconds = _time(line, base.get(case))
    if line["variant"] == "Base":
        base[case] = milliseconds
    variant = _variant(line["variant"], line["layer"])
    row = Measurement(
        variant=variant,
        case=case,
        phase=msgspec.convert(line["phase"], Phase),
        metric="latency_ns",
        method=PUBLISHED,
        samples=((milliseconds * _MS,),),
        # Which figures were measured together is unknown: no two of them share their rounds.
        group=number,
    )
    if line["variant"] != "Antithetic":
        return [row]
    paired = msgspec.structs.replace(case, members=case.members // 2, repeats=2, antithetic=True)
    row = msgspec.structs.replace(row, case=paired)
    if row.phase != "forward" or case not in base:
        return [row]
    plain = msgspec.structs.replace(
        row, variant=_variant("Base", ""), samples=((base[case] * _MS,),), group=-number
    )
    return [row, plain]


def _time(line: dict[str, str], base: float | None) -> float:
    """The time in ms, given as such or as a multiple of Base."""
    if line["time_ms"]:
        time = float(line["time_ms"])
    elif base is None:
        message = f"{line['variant']} is a multiple of Base, which is not on a line above it"
        raise ValueError(message)
    else:
        time = float(line["multiple_of_base"]) * base
    if not (math.isfinite(time) and time > 0):
        message = f"time_ms is {time:g}, not a time"
        raise ValueError(message)
    return time


def _case(line: dict[str, str]) -> Case:
    """The case: (out, in) and for convolutions also kernel and input."""
    try:
        out_channels, in_channels, *space = ast.literal_eval(line["shape"])
        kernel_size, input_size = space or ((), ())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        message = f"shape {line['shape']!r} is not (out, in) or (out, in, kernel, input)"
        raise ValueError(message) from error
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


def _variant(name: str, layer: str) -> Variant:
    """The variant of a published name: ``PermutedLinear(in_sparsity=.5)`` -> Permuted, in_sparsity 0.5."""
    if name in {"Base", "Naive"}:
        return Variant(scheme=name, mode="base" if name == "Base" else "naive", baseline=True)
    named = re.fullmatch(r"([\w ]+?)\s*(?:\((\w+)=([\d.]+)\))?", name)
    scheme = named[1].removesuffix(layer) if named else ""
    if named is None or scheme not in _SCHEMES:
        message = f"unknown variant {name!r}; known: {', '.join(_SCHEMES)}"
        raise ValueError(message)
    ours, options = _SCHEMES[scheme]
    if named[2]:
        key = _OPTIONS.get(named[2], named[2])
        if key not in _FIELD_ORDER:
            message = f"no option {key!r} is known for {name!r}; known: {', '.join(_FIELD_ORDER)}"
            raise ValueError(message)
        options = {key: int(named[3])} if key == "k" else {**options, key: float(named[3])}
        if key == "in_sparsity":
            options.pop("side", None)
    ordered = sorted(options.items(), key=lambda item: _FIELD_ORDER.index(item[0]))
    return Variant(scheme=ours, options=tuple(ordered))


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
