"""A population that is trained one candidate after another, and what becomes of it."""

import gc
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor, nn

from esbench.schema import Case
from impls.benchmark.training.candidates import Widths, clean, leaky, train, untrained
from impls.training.hygiene import Mode, Reclaim, Reclaimer, isolated, reclaim

Look = Callable[[int, nn.Sequential], object]
"""What is done with a candidate's number and its trained model, while it is there."""


def nobody(_: int, __: nn.Sequential) -> None:
    """Look at nothing."""


class Search(msgspec.Struct, frozen=True):
    """How a population is trained.

    ``leaky``: by the hooks that leak. ``linked``: every layer knows its model, as the vertices of a graph
    know each other, so that only the garbage collector lets go of it.
    """

    case: Case
    device: str
    seed: int
    mode: Mode = "nothing"
    leaky: bool = False
    linked: bool = False


@dataclass
class Outcome:
    """What a search leaves behind: losses [candidates, steps], digests of trained weights, what is alive.

    ``handles`` are of hooks that leak.
    """

    losses: Tensor
    digests: tuple[str, ...] = ()
    parameters: list["weakref.ref[Tensor]"] = field(default_factory=list)
    handles: list[torch.utils.hooks.RemovableHandle] = field(default_factory=list)

    @property
    def alive(self) -> int:
        """How many parameters of candidates are still there."""
        return sum(parameter() is not None for parameter in self.parameters)

    def release(self) -> None:
        """Let go of whatever the candidates left, as the end of a process does."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self.alive:
            gc.collect()


def run(
    search: Search,
    widths: Sequence[Widths],
    x: Tensor,
    look: Look = nobody,
    reclaimer: Reclaimer | None = None,
) -> Outcome:
    """Train each architecture from scratch on batches [steps, rows, channels], one after another."""
    plan, outcome = reclaim(search.mode, reclaimer), Outcome(torch.empty(0))
    losses: list[Tensor] = []
    for number, one in enumerate(widths):
        with plan.candidate():
            if search.mode == "subprocess":
                found, digest = isolated(alone, search, number, one, x.cpu(), torch.get_num_threads())
                losses.append(found)
                outcome.digests += (digest,)
            else:
                losses.append(_trained(search, number, one, x, plan, look, outcome))
    outcome.losses = torch.stack(losses)
    return outcome


def alone(search: Search, number: int, widths: Widths, x: Tensor, threads: int) -> tuple[Tensor, str]:
    """Train one candidate in a process of its own; return its losses [steps] and the digest of its weights.

    Sums come in another order with another number of threads.
    """
    torch.set_num_threads(threads)
    outcome = Outcome(torch.empty(0))
    x = x.to(search.device)
    losses = _trained(search, number, widths, x, reclaim("nothing"), nobody, outcome)
    return losses.cpu(), outcome.digests[0]


def _trained(  # noqa: PLR0913, PLR0917  a candidate, and where what is found goes
    search: Search, number: int, widths: Widths, x: Tensor, plan: Reclaim, look: Look, outcome: Outcome
) -> Tensor:
    """Make a candidate and train it; whatever it held is free when this returns, if nothing leaks."""
    model = untrained(widths, search.case, search.device, search.seed + number)
    outcome.parameters += [weakref.ref(parameter) for parameter in model.parameters()]
    candidate, handles = leaky(model) if search.leaky else (clean(model), [])
    outcome.handles += handles
    if search.linked:
        for layer in model:
            object.__setattr__(layer, "graph", model)  # no submodule: a model would be inside of itself
    found = train(candidate, plan.batches(x), search.case)
    outcome.digests += (digest_of(model),)
    look(number, model)
    return torch.stack(found)


def digest_of(model: nn.Module) -> str:
    """Return a digest of the bits of all weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
