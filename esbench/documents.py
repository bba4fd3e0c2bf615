"""Files that hold one record each: written whole or not at all, read strictly."""

import os
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from esbench.errors import UserError


class Document(Protocol):
    """A record that says which version of its kind it is."""

    @property
    def schema(self) -> int:
        """The version."""


D = TypeVar("D", bound=Document)


def write(document: Document, path: Path) -> Path:
    """Write a document in place of what was there; an interrupt leaves one of the two.

    Raises:
        ValueError: it could not be read back, for instance because a number is NaN.

    """
    text = msgspec.json.encode(document)
    msgspec.json.decode(text, type=type(document))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(text + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def read(path: Path, kind: type[D], *, what: str, schema: int, again: str) -> D:
    """Read a document of a kind.

    Args:
        path: the file.
        kind: the record's class.
        what: the kind in words, such as ``study of accuracy``.
        schema: the version that can be read.
        again: how a new one is had, where the version is another.

    Raises:
        UserError: the file cannot be read or does not hold one; the message names file and field.

    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        raise UserError(message) from error
    except ValueError as error:
        message = f"{path}: not a {what}: {error}"
        raise UserError(message) from error
    if document.schema != schema:
        message = f"{path}: a {what} of schema {document.schema}, this esbench reads {schema}: {again}"
        raise UserError(message)
    return document
