"""What a package of schemes says of using them on a person's own model: extend with ``@refusal.register``.

The harness imports no such package: what it knows of a model, a scheme's package has told it here.
"""

from collections.abc import Sequence
from functools import singledispatch


@singledispatch
def refusal(scheme: object, model: object, exclude: Sequence[str]) -> str:  # noqa: ARG001  for those who extend it
    """Say why a scheme cannot perturb a model, or nothing.

    Args:
        scheme: a registered one.
        model: an nn.Module.
        exclude: names of its modules that are left unperturbed.

    """
    return ""


@singledispatch
def learns_from_rows(scheme: object) -> bool:  # noqa: ARG001  for those who extend it
    """Whether a scheme's update needs the record of what its layers saw."""
    return False
