"""Who may import whom: the floors of the house. A new module is placed here."""

import ast
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("esbench/**/*.py"), *ROOT.glob("impls/**/*.py")])

ESBENCH = {
    "esbench": (),
    "esbench.errors": (),
    "esbench.schema": (),
    "esbench.registry": ("esbench.errors", "esbench.schema"),
    "esbench.plugins": ("esbench.errors",),
    "esbench.documentation": ("esbench.plugins", "esbench.schema"),
    "esbench.selection": ("esbench.schema", "esbench.registry"),
    "esbench.units": ("esbench.schema", "esbench.stats"),
    "esbench.stats": ("esbench.schema", "esbench.units"),
    "esbench.store": ("esbench.schema",),
    "esbench.progress": (),
    "esbench.git": ("esbench.errors",),
    "esbench.unfinished": ("esbench.errors", "esbench.schema", "esbench.store"),
    "esbench.documents": ("esbench.errors",),
    "esbench.studies": ("esbench.documents", "esbench.schema"),
    "esbench.compilations": ("esbench.documents",),
    "esbench.usage": (),
    "esbench.wheels": (),
    "esbench.digits": ("esbench.documents", "esbench.errors", "esbench.schema", "esbench.registry"),
    "esbench.gate.worker": ("esbench*", "torch*"),
    "esbench.gate.loading": (
        "esbench.gate.protocol",
        "esbench.plugins",
        "esbench.registry",
        "esbench.selection",
    ),
    "esbench.gate.controls": ("torch*",),
    "esbench.gate*": (
        "esbench",
        "esbench.errors",
        "esbench.gate*",
        "esbench.git",
        "esbench.progress",
        "esbench.schema",
        "esbench.store",
    ),
    "esbench.measure*": (
        "esbench",
        "esbench.digits",
        "esbench.errors",
        "esbench.git",
        "esbench.progress",
        "esbench.schema",
        "esbench.registry",
        "esbench.stats",
        "esbench.store",
        "esbench.studies",
        "esbench.unfinished",
        "esbench.measure*",
        "torch*",
    ),
    "esbench.report*": (
        "esbench.documentation",
        "esbench",
        "esbench.compilations",
        "esbench.digits",
        "esbench.errors",
        "esbench.gate.evidence",
        "esbench.gate.decision",
        "esbench.gate.records",
        "esbench.gate.study",
        "esbench.plugins",
        "esbench.schema",
        "esbench.units",
        "esbench.stats",
        "esbench.store",
        "esbench.studies",
        "esbench.report*",
    ),
    "esbench.benchmarks*": ("esbench*", "torch"),
    "esbench.cli*": ("esbench*",),
    "esbench.__main__": ("esbench.cli",),
}
"""Module (or glob) -> what it may import of esbench, impls and torch. The first that matches counts."""

IMPLS_FLOORS = (
    ("impls.kernels", "impls.kernels.words"),
    (
        "impls.kernels.bits",
        "impls.kernels.drawn",
        "impls.kernels.keys",
        "impls.kernels.matrices",
        "impls.kernels.planes",
        "impls.kernels.ranks",
        "impls.kernels.sums",
        "impls.kernels.rows",
    ),
    ("impls.kernels.autotune", "impls.kernels.tiles", "impls.kernels.member_tiles"),
    (
        "impls.kernels.dropout",
        "impls.kernels.fills",
        "impls.kernels.flipped",
        "impls.kernels.hadamard",
        "impls.kernels.lowrank",
        "impls.kernels.noise_sums",
        "impls.kernels.outer",
        "impls.kernels.permuted",
        "impls.kernels.redrawn",
        "impls.kernels.regenerated",
        "impls.kernels.sampling",
        "impls.kernels.sparse",
    ),
    ("impls.kernels.blocks",),
    ("impls.kernels.inspection.specimen",),
    ("impls.kernels.inspection.formats",),
    (
        "impls.kernels.inspection.bits",
        "impls.kernels.inspection.dropout",
        "impls.kernels.inspection.drawn",
        "impls.kernels.inspection.flipped",
        "impls.kernels.inspection.hadamard",
        "impls.kernels.inspection.lowrank",
        "impls.kernels.inspection.outer",
        "impls.kernels.inspection.permuted",
        "impls.kernels.inspection.sparse",
    ),
    ("impls.kernels.inspection",),
    (
        "impls.perturbation.axes",
        "impls.schemes.gates",
        "impls.perturbation.options",
        "impls.perturbation.philox",
        "impls.binary.words",
    ),
    ("impls.binary.bit_products",),
    ("impls.binary.bits",),
    ("impls.perturbation.noise",),
    ("impls.perturbation.operators",),
    ("impls.binary.operators",),
    ("impls.binary",),
    (
        "impls.perturbation.cores",
        "impls.schemes.walsh_hadamard",
        "impls.schemes.kappa_shuffled",
        "impls.perturbation.signs",
    ),
    ("impls.perturbation.scheme",),
    ("impls.perturbation.wrapping",),
    ("impls.schemes.binary", "impls.schemes.dense", "impls.schemes.lowrank"),
    (
        "impls.schemes.baselines",
        "impls.schemes.blocks",
        "impls.schemes.compiled",
        "impls.schemes.dropout",
        "impls.schemes.flipped",
        "impls.schemes.hadamard",
        "impls.schemes.mixture",
        "impls.schemes.orthogonal",
        "impls.schemes.permuted",
        "impls.schemes.regenerated",
        "impls.schemes.sparse",
        "impls.schemes.table",
    ),
    ("impls.schemes",),
    ("impls.fused.cores", "impls.fused.draws", "impls.fused.scheme", "impls.fused.updates"),
    (
        "impls.fused.binary",
        "impls.fused.dropout",
        "impls.fused.flipped",
        "impls.fused.hadamard",
        "impls.fused.lowrank",
        "impls.fused.permuted",
        "impls.fused.regenerated",
        "impls.fused.sparse",
    ),
    ("impls.fused",),
    ("impls.perturbation.layer",),
    ("impls.perturbation.values",),
    ("impls.perturbation.function_mode", "impls.perturbation.selection"),
    ("impls.perturbation.population",),
    ("impls.verify.reference",),
    ("impls.verify.checks",),
    ("impls.benchmark.networks",),
    (
        "impls.benchmark.inputs",
        "impls.training.evolution",
        "impls.training.gathering",
        "impls.training.graphs",
        "impls.training.guard",
        "impls.training.isolation",
        "impls.training.keepers",
        "impls.training.ownership",
        "impls.training.passes",
        "impls.training.ranks",
        "impls.training.sparsity",
        "impls.training.states",
        "impls.training.topology",
        "impls.training.watchdog",
        "impls.benchmark.minimum_work",
        "impls.quality.moments",
        "impls.quality.subject",
    ),
    (
        "impls.training.compile",
        "impls.training.connections",
        "impls.training.gradient_hooks",
        "impls.training.hygiene",
        "impls.training.parts",
        "impls.training.refusals",
        "impls.training.schedule",
        "impls.training.sentinel",
    ),
    (
        "impls.training.optimizer",
        "impls.training.snapshots",
        "impls.training.sparse_products",
    ),
    (
        "impls.training.backward",
        "impls.training.rigl",
        "impls.training.rigl_backward",
    ),
    ("impls.training",),
    (
        "impls.benchmark.training",
        "impls.benchmark.training.candidates",
        "impls.benchmark.training.rules",
        "impls.benchmark.training.stacks",
        "impls.benchmark.training.subjects",
        "impls.benchmark.training.written_updates",
    ),
    (
        "impls.benchmark.training.compile_trial",
        "impls.benchmark.training.search",
        "impls.benchmark.training.sparse_trainers",
        "impls.benchmark.training.steps",
    ),
    (
        "impls.benchmark.training.hygiene_trial",
        "impls.benchmark.training.sparse_schemes",
        "impls.benchmark.training.written_steps",
    ),
    (
        "impls.benchmark.training.sparse_digits",
        "impls.benchmark.training.sparse_training",
        "impls.benchmark.training.topology_update",
    ),
    (
        "impls.benchmark.training.backward",
        "impls.benchmark.training.compile",
        "impls.benchmark.training.hygiene",
        "impls.benchmark.training.rigl",
    ),
    ("impls.quality.kappa", "impls.quality.structure"),
    ("impls.quality.descent",),
    ("impls.quality.figures",),
    ("impls.quality",),
    ("impls.benchmark.baselines", "impls.benchmark.workload"),
    ("impls.benchmark.suites",),
    ("impls",),
    ("impls.kernels.compilation",),
)
"""From the ground up: a module imports only from floors below its own. A new module is placed here."""

Rules = Mapping[str, Collection[str]]


def impls_rules() -> Rules:
    """Return what each module of impls may import: torch, the contracts, and the floors below."""
    rules: dict[str, Collection[str]] = {}
    contracts = ("compilations", "digits", "documents", "errors", "git", "records", "registry", "usage")
    below: list[str] = ["torch*", *(f"esbench.{name}" for name in contracts)]
    for floor in IMPLS_FLOORS:
        rules |= dict.fromkeys(floor, tuple(below))
        below += floor
    # A search launches the kernels, which look up what it found.
    rules["impls.kernels.autotune"] = (*rules["impls.kernels.autotune"], "impls.kernels*")
    return rules


RULES = {**ESBENCH, **impls_rules()}


def module_name(path: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in SOURCES}


def imported(source: str, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, module) for every import anywhere in the source; relative ones as they stand."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            for alias in node.names:
                submodule = f"{package}.{alias.name}"
                yield node.lineno, submodule if submodule in modules else package


def import_violations(source: str, module: str, rules: Rules = RULES) -> list[str]:
    """Imports of esbench, impls, torch or relative names that the rules do not grant the module."""
    granted = next((rules[pattern] for pattern in rules if fnmatchcase(module, pattern)), None)
    if granted is None:
        return [f"{module} is on no floor: place it in tests/floors.py"]
    return [
        f"{module}:{line} imports {name}"
        for line, name in imported(source, MODULES)
        if name.partition(".")[0] in {"", "esbench", "impls", "torch", "tests"}
        and not any(fnmatchcase(name, pattern) for pattern in granted)
    ]
