"""Each tunable kernel computes the same with other tile sizes, and looks them up by its name."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from impls.kernels import gemm, outer
from impls.kernels.autotune import TASKS, distance, tolerance, tunables
from impls.kernels.tiling import Tiling

CPU, DTYPE = torch.device("cpu"), torch.float32
SMALL = (48, 64, 32)
"""In place of the first three sizes of a task."""
TILES = [Tiling(block_m=16, block_n=32, block_k=16), Tiling(block_m=32, block_n=16, block_k=32, group_m=1)]


@pytest.mark.parametrize("kernel", sorted({task.kernel for task in TASKS}))
def test_a_tunable_launches_the_kernel_that_it_names(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sizes of its task, and the same result for any tile sizes."""
    for more in dict.fromkeys(task.sizes[3:] for task in TASKS if task.kernel == kernel):
        sizes = (*SMALL, *(min(size, 8) for size in more))
        launch = tunables()[kernel].set_up(sizes, DTYPE, CPU)
        ask: Any = launch  # without tile sizes it looks up those that were tuned
        asked = Mock(return_value=TILES[0])
        for module in (gemm, outer):
            monkeypatch.setattr(module, "tuned", asked)
        result = ask(None).clone()
        ((name, _, *looked_up),) = {call.args for call in asked.call_args_list}
        assert name == kernel
        assert tuple(looked_up) == sizes
        assert distance(launch(TILES[1]), result) <= tolerance(DTYPE)
        assert float(result.norm()) > 0
