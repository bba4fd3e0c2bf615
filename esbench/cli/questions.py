"""What is to be trained, as a person asks for it: a shape, or a model of their own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from esbench.cli import shapes
from esbench.cli.options import note
from esbench.errors import UserError
from esbench.registry import DTYPES, Entry, trainer
from esbench.schema import Case

if TYPE_CHECKING:
    from esbench.measure.model_layers import Layers


class Question(NamedTuple):
    """What is to be trained: its name, its layers as cases by their names, and what to leave unperturbed.

    ``first_run`` is an expression for rows that the model has to see before it can be perturbed. Of a model
    ``parts`` are the numbers of each layer, and of all that is perturbed.
    """

    name: str
    layers: dict[str, Case]
    excluded: tuple[str, ...] = ()
    first_run: str = ""
    parts: Mapping[Case, tuple[int, int]] = {}

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases, each once."""
        return tuple(dict.fromkeys(self.layers.values()))


def question(
    linear: str | None,
    conv: str | None,
    model: str | None,
    template: Case,
    *,
    dtype: str | None,
    entries: Sequence[Entry],
) -> Question:
    """Return what is asked.

    Args:
        linear: a shape.
        conv: a shape.
        model: where a model is made.
        template: members, repeats, type and sigma.
        dtype: the type where one was asked for; by default each layer's own.
        entries: the schemes that are to perturb a model.

    Raises:
        UserError: not exactly one thing is asked, it cannot be read, or the model cannot be perturbed.

    """
    if sum(one is not None for one in (linear, conv, model)) != 1:
        message = (
            "recommend needs one of --linear, --conv and --model, such as --linear 1024x1024; see --help"
        )
        raise UserError(message)
    if linear is not None:
        return Question(f"recommend {linear}", {"": shapes.linear(linear, template)})
    if conv is not None:
        return Question(f"recommend {conv}", {"": shapes.conv2d(conv, template)})
    from esbench.measure.model_layers import layers, load_model

    name = str(model)
    made, rows = load_model(name)
    try:
        found = layers(made, rows, template, dtype=dtype)
    except UserError as error:
        message = f"--model {name}: {error}"
        raise UserError(message) from error
    _check(name, made, found, entries)
    for other in found.others:
        note(f"{other.name}: {other.why}")
    return Question(
        f"recommend {name}",
        {layer.name: layer.case for layer in found.chosen},
        _excluded(found),
        found.first_run,
        {layer.case: (layer.size, found.size) for layer in found.chosen},
    )


def _excluded(found: "Layers") -> tuple[str, ...]:
    return tuple(other.name for other in found.others if other.excluded)


def _check(name: str, model: object, found: "Layers", entries: Sequence[Entry]) -> None:
    """Look whether a model can be perturbed, before anything is measured.

    Raises:
        UserError: it cannot, and why.

    """
    for layer in found.chosen:
        if layer.case.dtype not in DTYPES:
            message = (
                f"--model {name}: {layer.name} is {layer.case.dtype}; esbench measures {', '.join(DTYPES)}"
            )
            raise UserError(message)
    fitting = [one for one in entries if any(one.supports(layer.case) for layer in found.chosen)]
    trainers = [(entry.scheme, one) for entry in fitting if (one := trainer(entry.scheme))]
    refused = [why for scheme, one in trainers if (why := one.refusal(scheme, model, _excluded(found)))]
    if refused and len(refused) == len(fitting):
        # A scheme may have a reason of its own, as one whose kernel needs a GPU: its row says so.
        why, _ = Counter(refused).most_common(1)[0]
        message = f"--model {name}: {why}; in the factory, requires_grad_(False) leaves a layer unperturbed"
        raise UserError(message)
