"""What to recommend a scheme for: a shape, or the layers of a model, from the options of the user."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from esbench.cli.options import note
from esbench.errors import UserError
from esbench.registry import DTYPES, Entry, trainer
from esbench.schema import Case

if TYPE_CHECKING:
    from esbench.measure.model_layers import Layers

_LARGEST = 2**31 - 1
_LINEAR = re.compile(r"(\d+)x(\d+)")
_CONV = re.compile(r"(\d+)x(\d+)x(\d+)(?:x(\d+))?@(\d+)x(\d+)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?")
_PREFIXES = ("", "K", "M", "G", "T")


class Question(NamedTuple):
    """What is to be trained.

    Attributes:
        name: of the run that measures it.
        layers: name of each layer -> its case.
        excluded: names of modules that are left unperturbed.
        first_run: expression for rows that the model must see before it can be perturbed.
        parts: case of each layer -> number of its parameters, and of all perturbed parameters.

    """

    name: str
    layers: dict[str, Case]
    excluded: tuple[str, ...] = ()
    first_run: str = ""
    parts: Mapping[Case, tuple[int, int]] = {}

    @property
    def cases(self) -> tuple[Case, ...]:
        """The distinct cases."""
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
    """Return the question that the options ask.

    Args:
        linear: value of --linear.
        conv: value of --conv.
        model: value of --model.
        template: case with members, repeats, dtype and sigma.
        dtype: value of --dtype; by default each layer of a model keeps its own.
        entries: the candidates.

    Raises:
        UserError: not exactly one of the three is given, it is malformed, or the model cannot be perturbed.

    """
    if sum(one is not None for one in (linear, conv, model)) != 1:
        message = (
            "recommend needs one of --linear, --conv and --model, such as --linear 1024x1024; see --help"
        )
        raise UserError(message)
    if linear is not None:
        return Question(f"recommend {linear}", {"": linear_case(linear, template)})
    if conv is not None:
        return Question(f"recommend {conv}", {"": conv2d_case(conv, template)})
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
    """Check that a model can be perturbed.

    Raises:
        UserError: a layer has an unsupported dtype, or every candidate refuses the model.

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
        # The most common reason: some schemes have another one, such as a kernel that needs a GPU.
        why, _ = Counter(refused).most_common(1)[0]
        message = f"--model {name}: {why}; to leave a layer out, call requires_grad_(False) in the factory"
        raise UserError(message)


def template_case(members: int, repeats: int, dtype: str | None, sigma: float) -> Case:
    """Return a case without a shape.

    Raises:
        UserError: the dtype is unknown, or a number is out of range.

    """
    if dtype is not None and dtype not in DTYPES:
        message = f"no dtype {dtype!r}; there are: {', '.join(DTYPES)}"
        raise UserError(message)
    if not (math.isfinite(sigma) and sigma > 0):
        message = f"--sigma {sigma:g}: expected a number above 0"
        raise UserError(message)
    for name, value in (("members", members), ("repeats", repeats)):
        if not 1 <= value <= _LARGEST:
            message = f"--{name} {value}: expected a number from 1 to {_LARGEST}"
            raise UserError(message)
    return Case(
        operator="",
        out_channels=1,
        in_channels=1,
        members=members,
        repeats=repeats,
        dtype=dtype or "float32",
        sigma=sigma,
    )


def linear_case(text: str, like: Case) -> Case:
    """Parse ``1024x512``: a Linear layer with 1024 outputs and 512 inputs.

    Raises:
        UserError: the text is malformed.

    """
    out, inp = _numbers("linear", text, _LINEAR, "OUTxIN, such as 1024x1024")
    return _with(like, operator="Linear", out_channels=out, in_channels=inp)


def conv2d_case(text: str, like: Case) -> Case:
    """Parse ``64x32x3@28x28``: a Conv2d layer with 64 outputs, 32 inputs and a kernel of 3 on 28 x 28 inputs.

    A kernel that is not square has two numbers: ``64x32x3x5@28x28``. There is no padding.

    Raises:
        UserError: the text is malformed, or the kernel is larger than the input.

    """
    expected = "OUTxINxKERNEL@HEIGHTxWIDTH, such as 64x64x3@32x32"
    out, inp, tall, *rest = _numbers("conv", text, _CONV, expected)
    height, width = rest[-2:]
    wide = rest[0] if len(rest) == 3 else tall  # noqa: PLR2004  # the kernel has two numbers
    if tall > height or wide > width:
        message = f"--conv {text}: a kernel of {tall} x {wide} is larger than an input of {height} x {width}"
        raise UserError(message)
    return _with(
        like,
        operator="Conv2d",
        out_channels=out,
        in_channels=inp,
        kernel_size=(tall, wide),
        input_size=(height, width),
    )


def size_bytes(text: str) -> float:
    """Parse ``2GB``, ``500 MB`` or ``1.5GiB``.

    Raises:
        UserError: the text is malformed, or the size is 0.

    """
    found = _BYTES.fullmatch(text.strip())
    size = float(found[1]) * (1024 if found[3] else 1000) ** _PREFIXES.index(found[2].upper()) if found else 0
    if not 0 < size < math.inf:
        message = f"--memory-limit {text}: expected a size above 0, such as 2GB or 500MB"
        raise UserError(message)
    return size


def _numbers(option: str, text: str, pattern: re.Pattern[str], expected: str) -> list[int]:
    found = pattern.fullmatch(text.strip().lower())
    numbers = [int(number) for number in found.groups() if number is not None] if found else []
    if not numbers or not all(1 <= number <= _LARGEST for number in numbers):
        message = f"--{option} {text}: expected {expected}, each from 1 to {_LARGEST}"
        raise UserError(message)
    return numbers


def _with(like: Case, **fields: object) -> Case:
    return msgspec.structs.replace(like, **fields)
