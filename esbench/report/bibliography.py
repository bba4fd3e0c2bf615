"""``references.bib``: the works that the variants of runs come from, found in the words of their sources.

A source is free text, such as ``EGGROLL, arXiv:2511.16652; the form for convolutions is ours``. A work that
is known by name has its title and authors; of another that has an arXiv number, a DOI, an address or a name
with a year there is an entry with that and with the words of the source. Words without any name no work.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping

from esbench.report.formats.latex import escape
from esbench.report.text import file_name, one_line
from esbench.report.works import WORKS, Work
from esbench.schema import Run, Variant

_PATTERNS = (
    ("arxiv", re.compile(r"\b(\d{4}\.\d{4,5})(?:v\d+)?\b")),
    ("doi", re.compile(r"\b(10\.\d{4,9}/[^\s,;]+[^\s,;.)])")),
    ("url", re.compile(r"\b(https?://[^\s,;]+[^\s,;.)])")),
)
_NAMED = re.compile(r"\b([A-Z][^\W\d_]+)(?: et al\.|(?:,? (?:and )?[A-Z][^\W\d_]+)+)? \(?((?:19|20)\d\d)\b")


def bibtex(works: Iterable[Work]) -> str:
    """The works as BibTeX reads them, in the order of their keys."""
    return "\n".join(map(_entry, sorted(works, key=lambda work: work.key)))


def sources(run: Run, catalogue: Mapping[str, str]) -> dict[Variant, str]:
    """What each variant of a run says it comes from; of a run that does not tell, what its scheme says here.

    Args:
        run: its header holds the sources of its variants by name, if it is new enough.
        catalogue: the words of schemes, by the names of their classes.

    """
    known = run.header.sources
    variants = dict.fromkeys(row.variant for row in run.rows)
    found = {each: known.get(each.name) or catalogue.get(each.scheme, "") for each in variants}
    return {variant: words for variant, words in found.items() if words}


def cited(run: Run, catalogue: Mapping[str, str]) -> list[str]:
    """The keys of the works that a run's variants come from."""
    return sorted({work.key for words in sources(run, catalogue).values() for work in works_in(words)})


def works(runs: Iterable[Run], catalogue: Mapping[str, str]) -> list[Work]:
    """All works that the variants of some runs come from, each once."""
    found: dict[str, Work] = {}
    for run in runs:
        for words in sources(run, catalogue).values():
            for work in works_in(words):
                found.setdefault(work.key, work)
    return list(found.values())


def works_in(words: str) -> list[Work]:
    """The works that a source names."""
    words = one_line(words)
    known = [work for work in WORKS if any(mark in words for mark in work.marks)]
    marks = {mark for work in known for mark in work.marks}
    fields = {field for work in known for field in work.fields.values()}
    found = [
        _unknown(kind, match[1], words)
        for kind, pattern in _PATTERNS
        for match in pattern.finditer(words)
        if match[1] not in marks | fields and not any(match[1] in field for field in fields)
    ]
    return [*known, *found] if known or found else [_named(match, words) for match in _NAMED.finditer(words)]


def _named(match: re.Match[str], words: str) -> Work:
    """A work of which no more is known than who and when."""
    who, year = match.groups()
    return Work(_key(f"{who} {year}"), "misc", (), {"author": who, "year": year, "note": words})


def _unknown(kind: str, identifier: str, words: str) -> Work:
    addresses = {"arxiv": f"https://arxiv.org/abs/{identifier}", "doi": f"https://doi.org/{identifier}"}
    fields = {"url": addresses.get(kind, identifier), "note": words}
    if kind == "arxiv":
        fields |= {"eprint": identifier, "archiveprefix": "arXiv"}
    elif kind == "doi":
        fields |= {"doi": identifier}
    return Work(_key(f"{kind} {identifier}"), "misc", (), fields)


def _key(words: str) -> str:
    """A key of plain letters: those with marks are taken without."""
    plain = unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode()
    return file_name(plain)


def _entry(work: Work) -> str:
    known = work in WORKS
    lines = [
        f"  {name} = {{{value if known else _value(name, value)}}}," for name, value in work.fields.items()
    ]
    return "\n".join([f"@{work.kind}{{{work.key},", *lines, "}", ""])


def _value(name: str, text: str) -> str:
    """A value that BibTeX can read: braces in it would end it, and an address is taken letter by letter."""
    plain = text.replace("{", "(").replace("}", ")")
    if name in {"url", "doi", "eprint", "year", "archiveprefix"}:
        return re.sub(r"[^\w:/.?&=+()~#-]", "", plain, flags=re.ASCII)
    return escape(plain)
