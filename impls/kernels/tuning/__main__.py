"""``python -m impls.kernels.tuning``: find the fastest tiles of kernels on this GPU, and write its table.

Exit codes: 0 done; 1 some tiles computed something else; 2 there is no GPU here, or the table cannot be read.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

import impls
from esbench import documents, git
from esbench.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune, write the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m impls.kernels.tuning",
        description="Time the tiles of every kernel on this GPU, and write the fastest into its table.",
    )
    parser.add_argument("--device", default="cuda", help="the GPU, such as cuda or cuda:1")
    parser.add_argument("--kernels", default="*", help="glob over names; other kernels keep what they have")
    parser.add_argument("--out", type=Path, help="file to write; by default the table of this GPU")
    asked = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        return _refused("tuning needs triton, which is not installed here")
    if not (asked.device.startswith("cuda") and torch.cuda.is_available()):
        return _refused(f"tuning needs a CUDA GPU, and torch sees none on this machine for {asked.device!r}")
    try:
        return _tune(torch.device(asked.device), asked.kernels, asked.out)
    except UserError as error:
        return _refused(str(error))


def _tune(device: torch.device, kernels: str, out: Path | None) -> int:
    import triton  # noqa: PLC0415  which need not be there

    from impls.kernels.tuned import SCHEMA, Table, path_of, read_table  # noqa: PLC0415  it loads triton
    from impls.kernels.tuning.clock import clock  # noqa: PLC0415  the same
    from impls.kernels.tuning.contest import contest, tasks  # noqa: PLC0415  the same
    from impls.kernels.tuning.tunables import TUNABLES  # noqa: PLC0415  the same

    chosen = [one for one in TUNABLES if fnmatchcase(one.kernel, kernels)]
    if not chosen:
        message = f"no kernel matches {kernels!r}; there are: {', '.join(one.kernel for one in TUNABLES)}"
        raise UserError(message)
    name = torch.cuda.get_device_name(device)
    path = out or path_of(name)
    before = read_table(path).found if path.exists() else ()
    found = {one.key: one for one in before if not fnmatchcase(one.kernel, kernels)}
    wrong = 0
    with torch.cuda.device(device):
        for tunable, task in tasks(chosen):
            came = contest(tunable, task, device, clock)
            one = came.configuration
            found[one.key] = one
            what = f"{one.kernel}, {one.dtype}, {one.sizes}"
            _say(f"{what}: {one.default_ns / one.time_ns:.3f} times as fast as its default, {one.tiling}")
            for tiling, reason in (came.left_out | came.wrong).items():
                _say(f"{what}: {tiling} took no part: {reason}")
            wrong += len(came.wrong)
    package = Path(impls.__file__).parent
    table = Table(
        schema=SCHEMA,
        device_name=name,
        torch=str(torch.__version__),
        triton=triton.__version__,
        commit=git.commit(package),
        dirty=git.is_dirty(package),
        found=tuple(found[key] for key in sorted(found)),
    )
    documents.write(table, path)
    _say(f"{len(found)} configurations of {name}, written to {path}")
    return 1 if wrong else 0


def _refused(reason: str) -> int:
    _say(reason)
    return 2


def _say(text: str) -> None:
    sys.stderr.write(f"tune: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
