"""What may be tuned computes the same with other tiles, and its launcher asks for tiles under its name."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from impls.kernels import outer, tuned
from impls.kernels.rows import Tiling
from impls.kernels.tuning.contest import distance, tolerance
from impls.kernels.tuning.tunable import Task, Tunable
from impls.kernels.tuning.tunables import TUNABLES

CPU = torch.device("cpu")
SMALL = (48, 64, 32)
"""In place of the first three sizes."""
TILES = [Tiling(rows=16, columns=32, deep=16), Tiling(rows=32, columns=16, deep=32, group=1)]


@pytest.mark.parametrize("tunable", TUNABLES, ids=lambda one: one.kernel)
def test_a_tunable_launches_the_kernel_that_it_names(
    tunable: Tunable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes of its task, and whatever the tiles with the same result."""
    for more in dict.fromkeys(task.sizes[3:] for task in tunable.tasks):
        task = Task(torch.float32, (*SMALL, *(min(size, 8) for size in more)))
        launch = tunable.set_up(task, CPU)
        ask: Any = launch  # without tiles it asks for those that were tuned
        asked = Mock(return_value=TILES[0])
        for module in (tuned, outer):
            monkeypatch.setattr(module, "tuned", asked)
        result = ask(None).clone()
        ((kernel, _, *sizes),) = {call.args for call in asked.call_args_list}
        assert kernel == tunable.kernel
        assert tuple(sizes) == task.sizes
        assert distance(launch(TILES[1]), result) <= tolerance(task.dtype)
        assert float(result.norm()) > 0
