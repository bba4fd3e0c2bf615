"""Studies of the harness itself: accuracy of its timers, power of its gate, training, compiled kernels."""

from pathlib import Path


def newest_files(results: Path, folder: str) -> list[Path]:
    """Return the newest study of each device in ``<results>/<device>/<folder>/``, by the devices' folders."""
    return list({path.parent: path for path in sorted(results.glob(f"*/{folder}/*.json"))}.values())
