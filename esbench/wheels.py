"""``python -m esbench.wheels`` prints the command to download the packages that measuring lacks here.

For a machine that cannot reach a package registry, such as a rented GPU. Needs only the standard library.
"""

import importlib.metadata
import sys
from pathlib import Path

MEASURING = ("filelock", "msgspec", "numpy", "nvidia-ml-py", "psutil", "torch", "typer", "typing-extensions")
"""Packages that ``esbench doctor`` and ``esbench run`` import; other dependencies are for reports."""
TESTING = ("hypothesis", "pytest", "pytest-xdist")
"""Further packages that the tests on a GPU need."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def missing_packages() -> list[str]:
    """Return ``name==version``, from constraints.txt, of each package that is needed but not installed."""
    lines = (Path(__file__).parent.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-"): line for line in lines if "==" in line}
    return [pinned.get(name, name) for name in (*MEASURING, *TESTING) if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    """Print the command that downloads missing wheels into wheels/; return 1 if any is missing, else 0."""
    names = missing_packages()
    if not names:
        sys.stdout.write("nothing is missing\n")
        return 0
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    platforms = " ".join(f"--platform {name}" for name in PLATFORMS)
    sys.stdout.write(
        f"python3 -m pip download --only-binary=:all: --implementation cp --python-version {version} "
        f"{platforms} --constraint constraints.txt --dest wheels {' '.join(names)}\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
