"""Training steps whose update happens inside the backward pass, beside those in which it comes after it.

All take AdamW, so that there is state. Fused kernels are to be compared with fused ones, foreach with
foreach.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor
from typing_extensions import override

from esbench.registry import Figure, Suite, Workload, WrongResultError, build, suite
from esbench.schema import PHASES, QUALITY, Case, Phase, Work
from impls.benchmark import inputs
from impls.benchmark.training import rules
from impls.benchmark.training.stacks import ACTIVATION_HEAVY, FEW_LARGE, MANY_SMALL, OPERATORS, TIED, stack
from impls.benchmark.training.steps import AbstractStep, left_alive
from impls.verify import reference


class StepWorkload(Workload):
    """A training step of a stack: forward, backward and the update, wherever that is."""

    noise_bytes = 0
    inputs: Sequence[Tensor] = ()
    unavailable: Mapping[Phase, str] = dict.fromkeys(
        PHASES[:-1], "a training step is measured as a whole; forward and backward alone are NoUpdate"
    )

    def __init__(self, scheme: AbstractStep, case: Case, device: str, seed: int) -> None:
        """Set the model, its rows and its optimizer up."""
        self._scheme, self._case, self._seed = scheme, case, seed
        self._rule = rules.adamw(scheme.kernel, device, inputs.dtype_of(case))
        self._model = stack(case, device, seed)
        self._attached = scheme.attach(self._model, self._rule)
        self._x = inputs.RotatingBuffers(
            inputs.normal(
                case.rows, case.in_channels, device=device, dtype=inputs.dtype_of(case), seed=seed + 1
            )
        )
        self.inputs = self._x.items

    @property
    @override
    def phases(self) -> Mapping[Phase, Callable[[], object]]:
        return {"step": self._step}

    @override
    def work(self, phase: Phase) -> Work | None:
        return None

    @override
    def enter(self, phase: Phase) -> None:
        self._x.restart()

    @override
    def verify(self) -> None:
        for _ in range(2):  # the first step of AdamW knows no moments
            self.enter("step")
            self._check()

    @override
    def confirm(self, phase: Phase) -> None:
        inputs.refill(self._case, self._x.items, self._seed + 5)
        self.enter(phase)
        self._check()

    @override
    def quality(self) -> Iterator[Figure]:
        yield Figure("live_gradient_bytes", "hooks", (float(self._live_gradient_bytes()),))
        state = (
            value
            for optimizer in self._attached.optimizers
            for slots in optimizer.state.values()
            for value in slots.values()
            if isinstance(value, Tensor)
        )
        yield Figure("state_bytes", "optimizer", (float(sum(value.nbytes for value in state)),))
        without, collected = left_alive(self._scheme)
        yield Figure("alive_count", "gc off", (float(without),))
        yield Figure("alive_count", "after collection", (float(collected),))

    def _step(self) -> Tensor:
        y: Tensor = self._model(self._x.take())
        rules.loss_of(y).backward()
        self._attached.finish()
        return y.detach()

    def _live_gradient_bytes(self) -> int:
        """Return the most bytes of gradients that are there at once in a step, exactly and on any device.

        A gradient comes when a tensor's own hook is called; it is gone when ``.grad`` is.
        """
        most = 0
        parameters = list(self._model.parameters())

        def look(gradient: Tensor) -> None:
            nonlocal most
            held = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
            most = max(most, held + gradient.nbytes)

        handles = [parameter.register_hook(look) for parameter in parameters]
        self._step()
        for handle in handles:
            handle.remove()
        return most

    def _check(self) -> None:
        """Hold a step to the written-out one: gradients as they come, weights and moments after it.

        Raises:
            WrongResultError: something else came out, or gradients are left.

        """
        parameters = dict(self._model.named_parameters())
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        kept = {name: rules.slots(self._attached.optimizers, one) for name, one in parameters.items()}
        came: dict[str, Tensor] = {}
        handles = [
            one.register_hook(lambda gradient, name=name: came.update({name: gradient.clone()}))
            for name, one in parameters.items()
        ]
        x = self._x.items[0]
        self._step()
        for handle in handles:
            handle.remove()
        if left := [name for name, one in parameters.items() if one.grad is not None]:
            message = f"gradients are left behind the step: {', '.join(left)}"
            raise WrongResultError(message)
        slow = rules.written_gradients(self._model, weights, x)
        wide = rules.written_gradients(
            reference.double(self._model), {name: one.double() for name, one in weights.items()}, x.double()
        )
        for name, parameter in parameters.items():
            reference.compare(f"gradient of {name}", came.get(name), wide[name], slow[name])
            if not self._attached.optimizers:
                reference.compare(f"weight {name}", parameter.detach(), weights[name].double(), weights[name])
                continue
            steps, *moments = kept[name]
            slows = rules.written_step(weights[name], slow[name], steps, *moments)
            truths = rules.written_step(
                weights[name].double(), wide[name], steps, *(moment.double() for moment in moments)
            )
            _, first, second = rules.slots(self._attached.optimizers, parameter)
            found = {"weight": parameter.detach(), "first moment": first, "second moment": second}
            for what, value in found.items():
                reference.compare(f"{what} of {name}", value, truths[what], slows[what])


@build.register(AbstractStep)
def _step(scheme: AbstractStep, case: Case, device: str, seed: int) -> Workload:
    return StepWorkload(scheme, case, device, seed)


def square(operator: str, width: int, rows: int, dtype: str = "float32") -> Case:
    """Make a case: layers of so many channels, and rows that pass through them."""
    return Case(
        operator=operator, out_channels=width, in_channels=width, members=1, repeats=rows, dtype=dtype
    )


CHECKS = tuple(square(operator, 4, 3, "float64") for operator in OPERATORS)
"""For the suite ``check``."""

VARIANTS = ("StandardStep*", "NoUpdate", "StepInBackward*", "LeakingHook")

suite(
    Suite(
        name="backward",
        description="training steps that update inside the backward pass: 100 x 64^2, 8 x 1024^2, others",
        cases=(
            square(MANY_SMALL, 64, 32),
            square(FEW_LARGE, 1024, 32),
            square(ACTIVATION_HEAVY, 128, 4096),
            square(TIED, 256, 64),
        ),
        variants=VARIANTS,
        phases=("step", QUALITY),
        cell_s=1.0,
        active=(),
    )
)

suite(
    Suite(
        name="backward_large",
        description="the same with 8 x 4096^2: two gigabytes for each variant",
        cases=(square(FEW_LARGE, 4096, 32),),
        variants=VARIANTS,
        phases=("step", QUALITY),
        cell_s=5.0,
        active=(),
    )
)
