"""Kernels that draw compile with keys that are read from memory."""

import pytest

pytest.importorskip("triton", reason="triton, which is for Linux only, is not installed")

from impls.kernels import keys, noise_sums, sampling
from impls.kernels.inspection import SPECIMENS
from impls.kernels.inspection.specimen import Specimen, inspect
from impls.perturbation.philox import ROUNDS, WEYL

HASH = Specimen(
    kernel=keys.round_keys_kernel,
    title="round keys",
    types={"keys": "*i64", "step": "*i64", "word0": "i64", "word1": "i64"},
    constants={"ROUNDS": ROUNDS, "FIRST": WEYL[0], "SECOND": WEYL[1]},
    instructions={},
    warps=1,
)

KERNELS = (noise_sums.noise_sum_kernel, sampling.sample_bits_kernel)


pytestmark = pytest.mark.usefixtures("compiled_once")


def test_the_hash_of_a_step_compiles() -> None:
    """It fits in registers."""
    assert inspect(HASH, 90).spilled_bytes == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_kernel_reads_its_key_from_memory(kernel: object) -> None:
    """The pointer stands in place of the key's first word, and costs no registers that spill."""
    specimen = next(one for one in SPECIMENS if one.kernel is kernel)
    pointed = specimen._replace(types={**specimen.types, "key0": "*i64"})
    assert inspect(pointed, 90).spilled_bytes == 0
