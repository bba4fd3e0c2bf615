"""Training steps in the harness: who meets which case, the slow truth, and the figures beside time."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esbench.plugins import load
from esbench.registry import REGISTRY, Entry, UnavailableError, Workload, WrongResultError, build
from esbench.schema import Case
from esbench.selection import suited, with_references
from impls.benchmark.training import rules
from impls.benchmark.training.backward import CHECKS, StepWorkload
from impls.benchmark.training.stacks import DEPTHS, OPERATORS
from impls.benchmark.training.steps import MODELS, AbstractStep, Attached
from impls.training.optimizer import Rule

load("impls")

ENTRIES = REGISTRY.select(REGISTRY.find_suite("backward").variants)
IN_BACKWARD = "StepInBackward(kernel=foreach, granularity=bucket)"
every_step = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.variant.name)
every_check = pytest.mark.parametrize("case", CHECKS, ids=lambda case: case.operator)


def workload(entry: Entry, case: Case) -> Workload:
    """Set a step up on the CPU."""
    return build(entry.scheme, case, "cpu", 0)


@every_step
@every_check
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_every_step_holds_to_the_slow_truth(entry: Entry, case: Case, dtype: str) -> None:
    """Gradients, weights and moments are those that are written out, before and after it was called."""
    step = workload(entry, msgspec.structs.replace(case, dtype=dtype))
    step.verify()
    step.enter("step")
    first, second = step.phases["step"](), step.phases["step"]()
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert not torch.equal(first, second)
    step.confirm("step")


def standard(model: nn.Module, rule: Rule) -> Optimizer:
    """Make the ordinary optimizer."""
    return rule(list(model.parameters()))


def stays(model: nn.Module, rule: Rule) -> Attached:
    """Forget to free the gradients."""
    optimizer = standard(model, rule)
    return Attached(optimizer.step, [optimizer])


def lazy(model: nn.Module, rule: Rule) -> Attached:
    """Update nothing."""
    return Attached(model.zero_grad, [standard(model, rule)])


def twice(model: nn.Module, rule: Rule) -> Attached:
    """Take two steps with one gradient."""
    optimizer = standard(model, rule)

    def finish() -> None:
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()

    return Attached(finish, [optimizer])


def partly(model: nn.Module, rule: Rule) -> Attached:
    """Leave a layer out."""
    optimizer = rule(list(model.parameters())[1:])

    def finish() -> None:
        optimizer.step()
        model.zero_grad()

    return Attached(finish, [optimizer])


def decayed(model: nn.Module, rule: Rule) -> Attached:
    """Forget the decay of weights."""
    optimizer = standard(model, rule)
    optimizer.param_groups[0]["weight_decay"] = 0.0

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Attached(finish, [optimizer])


def meddling(model: nn.Module, rule: Rule) -> Attached:  # noqa: ARG001  it has no optimizer
    """Change weights where no update is."""

    @torch.no_grad()
    def finish() -> None:
        model.zero_grad()
        next(model.parameters()).mul_(1.001)

    return Attached(finish)


@dataclass(frozen=True)
class Planted(AbstractStep):
    """A step with a mistake of one's choice."""

    mistake: Callable[[nn.Module, Rule], Attached] = stays

    def attach(self, model: nn.Module, rule: Rule) -> Attached:
        """Make the mistake."""
        return self.mistake(model, rule)


@every_check
@pytest.mark.parametrize("mistake", [stays, lazy, twice, partly, decayed, meddling])
def test_a_wrong_step_is_found(mistake: Callable[[nn.Module, Rule], Attached], case: Case) -> None:
    """Whatever is left out, done twice or changed besides is a wrong result."""
    with pytest.raises(WrongResultError):
        build(Planted(mistake=mistake), case, "cpu", 0).verify()


def test_steps_and_layers_never_meet() -> None:
    """No suite has a case that both a step and a perturbed layer are for, also with references added."""
    everybody = REGISTRY.select()
    steps = {entry.variant.name for entry in ENTRIES}
    for suite in REGISTRY.suites.values():
        chosen = with_references(suited(everybody, suite, ()))
        for case in suite.cases:
            present = {entry.variant.name for entry in chosen if entry.supports(case)}
            assert present <= steps if case.operator in OPERATORS else not present & steps


def test_one_step_is_base_and_one_is_naive() -> None:
    """All other rows are compared with the standard foreach step, and with the loop over parameters."""
    modes = {entry.variant.mode: entry.variant.name for entry in ENTRIES if entry.variant.mode != "batched"}
    assert modes == {"base": "StandardStep", "naive": "StandardStep(kernel=loop)"}


def figures(name: str, case: Case) -> dict[tuple[str, str], float]:
    """Return what a step says of its quality."""
    step = workload(REGISTRY.entries[name], case)
    step.enter("quality")
    found = {(figure.metric, figure.method): figure.samples for figure in step.quality()}
    assert all(len(samples) == 1 for samples in found.values())
    return {key: samples[0] for key, samples in found.items()}


LAYER_BYTES = 8 * 4 * 4


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("NoUpdate", None),
        ("StandardStep", None),
        ("StandardStep(kernel=loop)", None),
        ("StepInBackward", 1),
        ("StepInBackward(kernel=foreach, granularity=module)", 1),
        ("LeakingHook", 1),
    ],
)
def test_live_gradients_and_state_in_bytes(name: str, layers: int | None, operator: str) -> None:
    """A layer's gradient at a time, or all; AdamW keeps two moments and a number for each parameter."""
    case = next(case for case in CHECKS if case.operator == operator)
    found = figures(name, case)
    assert found["live_gradient_bytes", "hooks"] == LAYER_BYTES * (layers or DEPTHS[operator])
    slots = DEPTHS[operator] * (2 * LAYER_BYTES + 4)
    assert found["state_bytes", "optimizer"] == (0 if name == "NoUpdate" else slots)


@every_step
def test_only_the_leaking_recipe_leaks(entry: Entry) -> None:
    """With gc off models go by themselves; those of the recipe stay, and no collection frees them."""
    found = figures(entry.variant.name, CHECKS[1])
    expected = MODELS if entry.variant.name == "LeakingHook" else 0
    assert found["alive_count", "gc off"] == expected
    assert found["alive_count", "after collection"] == expected


@pytest.mark.parametrize(("field", "value"), [("members", 2), ("out_channels", 5)])
def test_a_case_that_is_no_stack_is_unavailable(field: str, value: int) -> None:
    """There is no population of steps, and layers that follow each other are square."""
    case = msgspec.structs.replace(CHECKS[0], **{field: value})
    with pytest.raises(UnavailableError, match="square layers and one member"):
        workload(ENTRIES[0], case)


def test_a_step_is_one_phase() -> None:
    """The other phases have a reason; a pair of tied layers need not be square."""
    case = msgspec.structs.replace(CHECKS[3], out_channels=6)
    step = workload(REGISTRY.entries[IN_BACKWARD], case)
    step.verify()
    assert isinstance(step, StepWorkload)
    assert set(step.phases) == {"step"}
    assert set(step.unavailable) == {"sample", "forward", "update"}
    assert step.work("step") is None


def test_a_rule_on_cuda_counts_its_steps_there() -> None:
    """A captured graph must count on the device; on a CPU there is nothing to capture."""
    parameters = [nn.Parameter(torch.ones(1))]
    kernels: tuple[rules.Kernel, ...] = ("loop", "foreach", "fused")
    for kernel, device in itertools.product(kernels, ("cpu", "cuda")):
        (group,) = rules.adamw(kernel, device)(parameters).param_groups
        assert group["capturable"] == (device == "cuda")
        assert (group["foreach"], group["fused"]) == (kernel == "foreach", kernel == "fused")
