"""No time without correctness: what a variant passes before it is measured."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import torch

from esbench.measure.failure import Failure, explain
from esbench.registry import Entry, build
from esbench.schema import Case, Variant


def examine(entry: Entry, case: Case, device: str, seed: int) -> Failure | None:
    """Build a variant on a case and hold it to its slow truth; return what is wrong, if anything."""
    try:
        build(entry.scheme, case, device, seed).verify()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a variant raises, its row says it
        fault = explain(error)
        return fault._replace(reason=f"{fault.reason} (on {case.label})")
    return None


class Oracle:
    """The small exact check, taken once for each variant and operator.

    Cases that are measured are large and in low precision, where a wrong scheme hides behind
    rounding; ``checks`` are small and in float64, where it cannot.
    """

    def __init__(self, checks: Sequence[Case], device: str, seed: int) -> None:
        """Remember the cases; no verdict is taken yet."""
        self._checks = checks
        self._device = device
        self._seed = seed
        self._verdicts: dict[tuple[Variant, str], Failure | None] = {}

    def verdict(self, entry: Entry, operator: str) -> Failure | None:
        """Return what is wrong with the variant on this operator.

        A check that the variant cannot serve is passed over.
        """
        key = (entry.variant, operator)
        if key not in self._verdicts:
            cases = (case for case in self._checks if case.operator == operator and entry.supports(case))
            faults = (examine(entry, case, self._device, self._seed) for case in cases)
            self._verdicts[key] = next(
                (fault for fault in faults if fault and fault.status == "failed"), None
            )
        return self._verdicts[key]


def tensors(result: object) -> Iterable[torch.Tensor]:
    """Yield every tensor of a result: one, or nested in mappings, sequences and dataclasses."""
    parts: Iterable[object] = ()
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        parts = result.values()
    elif isinstance(result, list | tuple):
        parts = result
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        parts = [getattr(result, part.name) for part in dataclasses.fields(result)]
    for part in parts:
        yield from tensors(part)
