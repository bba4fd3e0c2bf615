"""Schemes compiled by torch.compile: agreement with the reference, one program per kind of call, errors."""

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from torch import _dynamo, nn
from torch._dynamo import eval_frame
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from esbench.cli.options import load_usual
from esbench.registry import REGISTRY, Entry, UnknownNameError, entries_of_suite, load
from esbench.schema import Case
from esbench.workload import UnavailableError, build
from impls import Compiled, Population, perturb
from impls.schemes import compiled
from impls.verify.reference import check_forward, check_update
from tests.scheme_cases import fill, normal

load("impls")

# torch loads parts of itself that it warns of when it compiles first.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")

ENTRIES = [entry for entry in REGISTRY.select(["Compiled*"]) if isinstance(entry.scheme, Compiled)]
LINEAR = Case(operator="Linear", out_channels=24, in_channels=16, members=40, repeats=2)
SMALL = [
    msgspec.structs.replace(case, dtype="float32", repeats=2, antithetic=True)
    for case in REGISTRY.find_suite("check").cases[:2]
]


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Trace with dynamo but run the trace eagerly; yield the options of each compilation."""
    compilations: list[dict[str, Any]] = []
    original = torch.compile

    def trace(function: Any, **options: Any) -> Any:
        compilations.append(options)
        return original(function, backend="eager", **options)

    compiled.program.cache_clear()
    monkeypatch.setattr(torch, "compile", trace)
    yield compilations
    compiled.program.cache_clear()
    torch.compiler.reset()


def population(
    of: str, *, members: int = 6, dtype: torch.dtype = torch.float32, **options: Any
) -> Population:
    """Make a population of a small Linear layer, 7 inputs and 5 outputs."""
    return perturb(fill(nn.Linear(7, 5), dtype), Compiled(of=of), members=members, sigma=0.1, **options)


def test_compiled_schemes_agree_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces run by a backend that computes in place, as compiled code does, agree with the reference.

    tests/studies/test_compiled.py compiles to machine code, which takes half a minute.
    """
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for of in ("LowRankSign", "SparsePerturbed(k=1)"):
        compiled.program.cache_clear()
        for dtype, antithetic in ((torch.float64, False), (torch.float32, True)):
            compiled_population = population(of, dtype=dtype, antithetic=antithetic)
            x = normal(12, 7).to(dtype)
            check_forward(compiled_population, x, range(6))
            check_update(compiled_population, x, range(6))
        assert compiled.program.cache_info().currsize == 4
    compiled.program.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)
def test_every_registered_variant_is_traced_as_a_whole(
    entry: Entry, compilations: list[dict[str, Any]]
) -> None:
    """Forward and update are one correct trace each; the properties are those of the wrapped scheme."""
    for case in SMALL:
        build(entry.scheme, case, "cpu", 0).verify()
    assert compilations == [{"fullgraph": True, "dynamic": False}] * 2 * len(SMALL)

    assert isinstance(entry.scheme, Compiled)
    scheme, plain = entry.scheme, entry.scheme.plain
    weight = torch.randn(1, 24, 16)
    assert entry.variant.label("Linear") == f"CompiledLinear(of={scheme.of})"
    assert scheme.flops(weight.shape, 40) == plain.flops(weight.shape, 40)
    assert scheme.kappa(weight, 40) == plain.kappa(weight, 40)
    for name in ("shard_multiple", "supports_antithetic", "stream"):
        assert getattr(scheme, name) == getattr(plain, name)
    noise_bytes = {
        perturb(nn.Linear(16, 24), each, members=4, sigma=0.1).noise_bytes for each in (scheme, plain)
    }
    assert len(noise_bytes) == 1


def test_only_new_shapes_scales_and_members_compile(compilations: list[dict[str, Any]]) -> None:
    """New steps and values compile nothing; new shapes, scales and members compile once each."""
    first = population("Hadamard")
    for step in range(3):
        noise = first.sample(step)
        first(normal(6, 7).float() + step, noise=noise)
        first.update(noise, normal(6))
    assert len(compilations) == 2
    for changed, rows in (
        (first, 12),
        (population("Hadamard", antithetic=True), 12),
        (population("Hadamard", members=3), 3),
        (population("Hadamard", dtype=torch.float64), 6),
    ):
        before = len(compilations)
        for step in range(2):
            x = normal(rows, 7).to(next(changed.model.parameters()))
            changed(x, noise=changed.sample(step))
        assert len(compilations) == before + 1
    # More shapes than the compiler caches for one function stay in the cache.
    before, many = len(compilations), range(3, _dynamo.config.recompile_limit + 6)
    for repeats in (*many, *many):
        first(normal(6 * repeats, 7).float(), noise=first.sample(0))
    assert len(compilations) == before + len(many)


def test_a_scheme_that_cannot_be_compiled_is_refused_with_a_reason() -> None:
    """Making a population raises an error; a workload is unavailable with the same reason."""
    for of, reason in (
        ("DropoutMask(side=out)", "differentiates rows"),
        ("Compiled(of=Hadamard)", "another implementation of a scheme"),
        ("Binary", "multiplies packed bits"),
        ("FusedLowRankSign", "another implementation of a scheme"),
        ("LowRank(rank=1, regenerated=True)", "drawn in the forward"),
        ("Regenerated", "drawn in the forward"),
        ("Base", "a plain layer, not a scheme"),
    ):
        with pytest.raises(ValueError, match=reason):
            population(of)
        with pytest.raises(UnavailableError, match=reason):
            build(Compiled(of=of), LINEAR, "cpu", 0)
    with pytest.raises(UnknownNameError, match="no variant 'Hadmard'; closest: Hadamard, "):
        population("Hadmard")
    with pytest.raises(ValueError, match="needs the name of a variant, as in of='Hadamard'"):
        Compiled(of="")


def test_a_missing_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU needs a C++ compiler, a GPU triton and a compute capability, and Python must be supported."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", Mock(side_effect=InvalidCxxCompiler))
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler on a CPU: No working C\+\+ compiler"):
        population("Hadamard")
    monkeypatch.setattr(torch.cuda, "get_device_capability", Mock(return_value=(6, 1)))
    monkeypatch.setattr(importlib.util, "find_spec", Mock())
    assert "capability 7.0 or more, this one has 6.1" in compiled.missing_compiler_reason(cuda)
    monkeypatch.setattr(importlib.util, "find_spec", Mock(return_value=None))
    assert "needs triton on a GPU" in compiled.missing_compiler_reason(cuda)
    assert "the layer is on mps" in compiled.missing_compiler_reason(torch.device("mps"))
    assert not compiled.missing_compiler_reason(torch.device("meta"))
    monkeypatch.setattr(eval_frame, "is_dynamo_supported", Mock(return_value=False))
    assert compiled.missing_compiler_reason(cpu) == "torch.compile does not support this version of Python"


def test_compiled_variants_are_measured_only_on_request() -> None:
    """Compiled variants are measured only if they are selected by name."""
    names = {entry.variant.name for entry in load_usual(None, None)}
    assert "Hadamard" in names
    assert not any(name.startswith("Compiled") for name in names)
    assert [entry.variant for entry in load_usual(["Compiled*"], None)] == [
        entry.variant for entry in ENTRIES
    ]
    for name in ("quick", "gate", "gate_cuda", "readme", "kernels"):
        entries = entries_of_suite(REGISTRY.select(), REGISTRY.find_suite(name), ())
        assert not any(entry in ENTRIES for entry in entries)
