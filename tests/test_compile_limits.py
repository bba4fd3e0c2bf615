"""What would run eager, in part or beside others, and says so. Graphs run as they are: no compiler."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from impls.training.compile import SharedLayers, SilentlyEagerError, WholeModels

# torch hides this warning of its own in a way that warnings as errors do not know.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    """Begin, and end, without graphs of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Broken(nn.Module):
    """Two graphs, of which only that of the head differs between architectures."""

    def __init__(self, width: int) -> None:
        """Make both parts."""
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        torch._dynamo.graph_break()  # noqa: SLF001  torch has no public name for it
        return self.head(y)


def test_a_model_that_would_run_half_eager_is_refused() -> None:
    """The graph before a break is compiled already, and the one behind it may not be."""
    whole, x = WholeModels("eager", recompile_limit=3), torch.ones(3, 4)
    models = [whole.compile(Broken(width)) for width in range(2, 7)]
    for model in models[:3]:
        whole.check(model, x)
    for _ in range(2):
        with pytest.raises(SilentlyEagerError, match="behind a graph break in it, would run eager"):
            models[4](x)
    whole.check(models[0], x)


def test_a_graph_of_another_thread_does_not_count() -> None:
    """A call that runs eager while another thread runs a graph is refused."""
    layers, x = SharedLayers("eager"), torch.ones(3, 4)
    busy, layer = layers.replace(nn.Linear(4, 4)), layers.replace(nn.Linear(4, 4))
    busy(x)

    def eager(*_: object) -> Tensor:
        other = threading.Thread(target=layers.graphs(torch.fx.symbolic_trace(nn.Identity()), [x]), args=(x,))
        other.start()
        other.join()
        return x

    layers._compiled = eager  # noqa: SLF001  what torch does behind the limit, beside a thread
    with pytest.raises(SilentlyEagerError, match="would run eager from here on"):
        layer(x)


def test_a_functional_transform_is_named() -> None:
    """It runs compiled functions eager, whatever the limit: the error does not send to that."""
    layers = SharedLayers("eager")
    model = layers.replace(nn.Linear(4, 4))
    with pytest.raises(SilentlyEagerError, match=r"torch\.func \(vmap, grad"):
        torch.vmap(model)(torch.ones(5, 3, 4))
    values = {name: one.detach() for name, one in model.named_parameters()}
    with pytest.raises(SilentlyEagerError, match=r"torch\.func \(vmap, grad"):
        torch.func.grad(lambda those: torch.func.functional_call(model, those, (torch.ones(3, 4),)).sum())(
            values
        )
