"""The command line: its commands are in the modules beside this one, and `esbench --help` lists them.

Exit codes: 0 done; 1 a variant failed, what was checked does not hold, or a file could not be read in full;
2 usage or environment; 3 the run is invalid; 130 interrupted. Commands import what they need, so that
``--help`` answers at once.
"""

import sys
from typing import Annotated

import typer

import esbench
from esbench.cli import (
    accuracy,
    digits,
    export,
    gate,
    gate_study,
    history,
    measuring,
    plot,
    profile,
    reading,
    recommend,
    run,
)
from esbench.cli.options import INTERRUPTED, USAGE, app
from esbench.errors import UserError

__all__ = [
    "accuracy",
    "app",
    "digits",
    "export",
    "gate",
    "gate_study",
    "history",
    "main",
    "measuring",
    "plot",
    "profile",
    "reading",
    "recommend",
    "run",
]

USAGE_ERROR: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""What all usage errors derive from: click's own class, or typer's copy of it since 0.28."""


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)
    ] = False,
) -> None:
    """Take what stands in front of the command."""
    if version:
        typer.echo(esbench.__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; every error ends in one line and the documented exit code."""
    try:
        code = app(standalone_mode=False)
    except (USAGE_ERROR, UserError, OSError) as error:
        text = getattr(error, "format_message", error.__str__)()
        sys.stderr.write(f"esbench: {' '.join(text.split())}\n")
        code = USAGE
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.stderr.write("esbench: this command measures, and needs torch: pip install torch\n")
        code = USAGE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    sys.exit(code)
