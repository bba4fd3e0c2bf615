"""Suite peers: checks of generations with planted bugs, and rows of libraries that cannot run."""

from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from esbench.registry import REGISTRY, load
from esbench.schema import QUALITY, Case
from esbench.workload import UnavailableError, Workload, WrongResultError, build
from impls.benchmark.peers import workload
from impls.benchmark.peers.networks import OPERATORS
from impls.benchmark.peers.populations import Esbench
from impls.benchmark.peers.suite import CHECKS, case
from impls.benchmark.peers.torch_func import BatchedProducts, LoopOverMembers, VmapByHand, VmapSearch
from impls.benchmark.peers.workload import (
    AbstractLibrary,
    AbstractOpenSearch,
    AbstractPeer,
    AbstractSearch,
    Task,
    training_curve,
)

load("impls")

SMALL = case(64, width=16, rows=8)
VARIANTS = [entry for entry in REGISTRY.select() if {*(entry.operators or ("",))} <= {*OPERATORS}]
OWN = [entry for entry in VARIANTS if not isinstance(entry.scheme, AbstractLibrary)]
LIBRARIES = [entry for entry in VARIANTS if isinstance(entry.scheme, AbstractLibrary)]


def built(scheme: object, small: Case = SMALL) -> Workload:
    """Set a variant up."""
    return build(scheme, small, "cpu", 0)


@pytest.mark.parametrize(
    ("entry", "small"),
    [(entry, small) for entry in OWN for small in (SMALL, *CHECKS) if entry.supports(small)],
    ids=lambda value: f"{value.operator}-{value.dtype}" if isinstance(value, Case) else value.variant.name,
)
def test_generations_without_a_library_are_right(entry: Any, small: Case) -> None:
    """Losses of members, and the direction of updates, agree with the plain network, also on new inputs."""
    here = built(entry.scheme, small)
    here.verify()
    for phase in here.phases:
        here.enter(phase)
        here.confirm(phase)


def test_variants_without_a_library_learn_alike() -> None:
    """From one start and on the same batches, dense noise by hand and by a population end at like losses."""
    small = msgspec.structs.replace(workload.LEARNED, out_channels=16, members=32, repeats=16)
    start, by_hand = training_curve(VmapByHand(), small, "cpu", 0)
    other_start, by_population = training_curve(Esbench("Perturbed"), small, "cpu", 0)
    assert start == other_start
    assert by_hand == pytest.approx(by_population, rel=0.2)
    assert by_hand < 0.5 * start


def test_parts_of_a_population_take_the_same_generations() -> None:
    """Losses and updates are those of all members on all rows, whatever is evaluated at a time."""
    exact = msgspec.structs.replace(case(1024, width=16, rows=3), dtype="float64")
    task = workload.task_of(exact, "cpu", 0, y=workload.classes(3, "cpu", 0), learning_rate=0.01)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).double()
    whole, parts = Esbench("LowRank").search(task), Esbench("LowRank", part=256, rows=2).search(task)
    for _ in range(2):
        torch.testing.assert_close(parts.step(x), whole.step(x))
    torch.testing.assert_close(parts.center(), whole.center())
    assert isinstance(parts, AbstractOpenSearch)
    assert isinstance(whole, AbstractOpenSearch)
    drawn = parts.draw(), whole.draw()
    assert [len(each) for each in drawn] == [2, 1]
    torch.testing.assert_close(parts.member(drawn[0], 900), whole.member(drawn[1], 900))


def test_forms_of_dense_noise_take_the_same_generations() -> None:
    """All draw the same noise, so that their networks stay equal up to rounding."""
    y = workload.classes(4, "cpu", 0)
    task = workload.task_of(SMALL, "cpu", 0, y=y, learning_rate=0.01)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    schemes = (VmapByHand(), VmapByHand(chunk_size=5), BatchedProducts(), LoopOverMembers())
    searches = [scheme.search(task) for scheme in schemes]
    for search in searches:
        search.step(x)
        search.step(x)
    first, *others = (search.center() for search in searches)
    assert not torch.equal(first, task.start)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)


class Wrong(VmapSearch):
    """A search with a planted bug."""

    def __init__(self, task: Task, bug: str) -> None:
        super().__init__(task, 0)
        self.bug = bug

    @override
    def evaluate(self, drawn: Any, x: Tensor) -> Tensor:
        losses = super().evaluate(drawn, x)
        if self.bug == "one row":
            return super().evaluate(drawn, x[:1].expand_as(x))
        return losses.roll(1) if self.bug == "other members" else losses

    @override
    def step(self, x: Tensor) -> Tensor:
        if self.bug == "stays":
            return self.evaluate(self.draw(), x)
        if self.bug == "first input":
            self.first = getattr(self, "first", x.clone())
            return super().step(self.first)
        before = self._center
        losses = super().step(x)
        if self.bug == "ascends":
            self._center = 2 * before - self._center
        return losses


@dataclass(frozen=True)
class WrongPeer(AbstractPeer):
    """A variant with a planted bug."""

    bug: str

    @override
    def search(self, task: Task) -> AbstractSearch:
        return Wrong(task, self.bug)


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("other members", "loss of member"),
        ("one row", "loss of member"),
        ("ascends", "updates has a cosine of -"),
        ("stays", "updates is zero"),
        ("first input", "updates has a cosine of"),
    ],
)
def test_a_wrong_generation_gets_no_time(bug: str, words: str) -> None:
    """A wrong loss, no step, a step in a wrong direction and a step on old inputs are found."""
    with pytest.raises(WrongResultError, match=words):  # noqa: PT012  either check may find it
        here = built(WrongPeer(bug))
        here.verify()
        here.enter("step")
        here.confirm("step")


def test_a_variant_that_does_not_learn_is_visible() -> None:
    """Its quality has a reason with both losses instead of numbers."""
    with pytest.raises(WrongResultError, match=r"does not learn: the loss is 2\.\d+ at the start and 2\.\d+"):
        training_curve(WrongPeer("stays"), msgspec.structs.replace(SMALL, members=2), "cpu", 0)


@dataclass(frozen=True)
class Library(AbstractLibrary):
    """A library that is a plain search once its modules are found."""

    NAME: ClassVar[str] = "torch"

    @override
    def search(self, task: Task) -> AbstractSearch:
        self.modules("torch", "no_such_module")
        return VmapSearch(task, 0)


def test_a_library_that_cannot_run_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is missing, has another version than the variant is written for, or cannot be imported."""
    with pytest.raises(UnavailableError, match=r"torch .* is installed; this variant is written for 0\.1"):
        built(Library("0.1"))
    with pytest.raises(UnavailableError, match="torch cannot be imported: No module named 'no_such_module'"):
        built(Library(metadata.version("torch")))
    monkeypatch.setattr(Library, "NAME", "no-such-library")
    with pytest.raises(UnavailableError, match="no-such-library is not installed: nox -s peers installs it"):
        built(Library("0.1"))


@pytest.mark.parametrize("entry", LIBRARIES, ids=lambda entry: entry.variant.name)
def test_variants_of_libraries_run_where_they_are_installed(entry: Any) -> None:
    """Without its library, at its version, a variant has a reason; with it the variant passes its checks."""
    for small in (*(msgspec.structs.replace(small, dtype="float32") for small in CHECKS), SMALL):
        try:
            built(entry.scheme, small).verify()
        except UnavailableError as error:
            reasons = ("installed", "measured up to", "takes linear layers")
            assert any(reason in str(error) for reason in reasons)  # noqa: PT017  either is right
            if small is SMALL:
                return
    if "generations" not in entry.variant.name and "compiled" not in entry.variant.name:
        training_curve(entry.scheme, workload.LEARNED, "cpu", 0)


def test_quality_has_a_value_or_a_reason_for_each_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, memory and set-up are compared on one case each, where n_eff is that of independent pairs."""
    monkeypatch.setattr(workload, "LEARNED", SMALL)
    monkeypatch.setattr(workload, "LEARNS", 1.0)
    here = built(VmapByHand())
    here.enter(QUALITY)
    metrics = {(metric.metric, metric.method): metric for metric in here.quality()}
    assert metrics["n_eff_count", "quality law"].samples == (SMALL.members,)
    assert metrics["set_up_ns", "first generation"].samples[0] > 0
    assert metrics["loss", "200 generations"].samples[0] < metrics["loss", "start"].samples[0]
    assert metrics["process_peak_bytes", "fresh process"].reason.startswith("measured on GenerationMLP")


def test_suite_spans_the_populations() -> None:
    """The suite has the cases that its quality is measured on, and every variant of this workload."""
    suite = REGISTRY.suites["peers"]
    assert {2 * small.members for small in suite.cases} == {64, 256, 2048, 16384}
    assert {small.operator for small in suite.cases} == {*OPERATORS}
    assert {workload.LEARNED, workload.MEASURED_ALONE} <= {*suite.cases}
    assert {entry.variant for entry in REGISTRY.select(suite.variants)} == {
        entry.variant for entry in VARIANTS
    }
