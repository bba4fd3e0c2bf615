"""The command line: one file per command; `esbench --help` lists them.

Exit codes: 0 success; 1 a variant failed, a check failed, or a file could not be read in full; 2 usage or
environment; 3 the run is invalid; 130 interrupted. Commands import what they need when they are called, so
that ``--help`` is fast.
"""

import sys
from typing import Annotated

import typer
from typer.models import CommandInfo

import esbench
from esbench.cli import (  # noqa: F401  # each registers its command
    accuracy,
    check,
    compare,
    digits,
    doctor,
    export,
    gate,
    history,
    listing,
    plot,
    profile,
    recommend,
    report,
    run,
    scaling,
    tasks,
)
from esbench.cli.options import FAILED, INTERRUPTED, USAGE, app
from esbench.errors import UserError
from esbench.supervisor import child
from esbench.text import one_line

__all__ = ["app", "main"]

FIRST = ("run", "recommend", "report")
"""The commands that most people need, at the top of the list; the others follow by name."""


def _place(command: CommandInfo) -> tuple[int, str]:
    """Return the sort key of a command: those in FIRST come first, the others by name."""
    name = command.name or str(getattr(command.callback, "__name__", ""))
    return FIRST.index(name) if name in FIRST else len(FIRST), name


app.registered_commands.sort(key=_place)

USAGE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""The base class of usage errors: click's, or since typer 0.28 its copy of it."""


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Handle options before the command."""
    if version:
        typer.echo(esbench.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _message(error: Exception) -> str:
    """Return the message of an expected error; usage errors have a method for it."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(getattr(error, "format_message", error.__str__)())


def main() -> None:
    """Run the command line; every expected error is one line and a documented exit code."""
    code: int | None = FAILED
    try:
        code = app(prog_name="esbench", standalone_mode=False)
    except (USAGE_ERROR, UserError, OSError) as error:
        if not child().announcement.lost:  # else the supervisor prints the reason
            sys.stderr.write(f"esbench: {one_line(_message(error))}\n")
        code = USAGE
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.stderr.write("esbench: this command needs torch: pip install torch\n")
        code = USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    finally:
        child().announce(code=code or 0)
    sys.exit(code)
