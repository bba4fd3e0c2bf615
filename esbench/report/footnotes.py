"""The reasons that cells only have room to hint at, numbered under their table."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from esbench.report import captions
from esbench.schema import Skipped

NOTHING = "-"
"""The cell of what never met in the run."""
EMPTY = "no samples"
"""The cell of a row that was stored without any sample."""
EMPTY_NOTE = f"{EMPTY}: the row was stored without any, measure it again"


@dataclass
class Footnotes:
    """Collects the notes of a table while its cells are printed."""

    reasons: list[str] = field(default_factory=list)
    holes: bool = False

    def __iter__(self) -> Iterator[str]:
        """What the cells hint at, once they are printed."""
        if self.holes:
            yield f"{NOTHING}: not in this run"
        for number, reason in enumerate(self.reasons, start=1):
            yield f"[{number}] {reason}"

    def hole(self) -> str:
        """The cell of what never met in the run."""
        self.holes = True
        return NOTHING

    def empty(self) -> str:
        """The cell of a row without any sample."""
        return self.hint(EMPTY, EMPTY_NOTE)

    def reason(self, skipped: Skipped, more: str = "") -> str:
        """The cell of a row without a number, and what else there is to say in it."""
        hint = "failed" if skipped.status == "failed" else captions.shorten(skipped.reason)
        return self.hint(f"{hint}{more}", f"{skipped.status}: {skipped.reason}")

    def hint(self, hint: str, note: str) -> str:
        """A cell that has room for a hint, and what there is to say of it."""
        if note not in self.reasons:
            self.reasons.append(note)
        return f"{hint} [{self.reasons.index(note) + 1}]"
