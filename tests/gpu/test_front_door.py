"""Runs a variant on a CUDA GPU as a test of pytest-benchmark."""

from pathlib import Path

import pytest

from tests.pytest_cases import run_pytest

pytestmark = pytest.mark.alone


def test_a_variant_is_benchmarked_on_the_gpu(tmp_path: Path) -> None:
    """The benchmark waits for the GPU: its time is not below that of writing 17 GB of noise."""
    plugin = tmp_path / "wide.py"
    plugin.write_text(
        "from esbench.schema import Case\n"
        "from esbench.registry import Suite, suite\n"
        "wide = Case(operator='Linear', out_channels=2048, in_channels=2048, members=1024)\n"
        "suite(Suite(name='wide', description='', cases=(wide,)))\n"
    )
    named = ("--esbench-plugin", "wide.py", "--esbench-suite", "wide", "--esbench-variants", "Perturbed")
    timing = ("--esbench-phases", "sample", "--benchmark-max-time", "0.1", "--benchmark-json", "stored.json")
    ended = run_pytest(tmp_path, *named, *timing, "--esbench-device", "cuda")
    assert ended.code == 0, ended.printed
    (benchmark,) = ended.stored["benchmarks"]
    assert benchmark["extra_info"]["device"] == "cuda"
    assert (
        benchmark["extra_info"]["peak_bytes"] >= benchmark["extra_info"]["noise_bytes"] == 4 * 1024 * 2048**2
    )
    # 17 GB at 10 TB/s, which is faster than any current GPU can write.
    assert benchmark["stats"]["min"] > 1.7e-3
