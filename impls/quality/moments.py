"""The inner products of members, added up: all that kappa and the correlation of members need of them.

With A_ij = <E_i, E_j> of M members and r_i its sums over j != i, five numbers are enough, and they are had
from the M x M products or, where there are more members than weights, from the d x d ones.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Sums over the inner products of members.

    Attributes:
        members: M.
        trace: sum of A_ii.
        total: sum of A_ij, i != j.
        squares: sum of A_ij^2, i != j.
        margins: sum of r_i^2.

    """

    members: int
    trace: float
    total: float
    squares: float
    margins: float


def moments(rows: Tensor) -> Moments:
    """Add the inner products of members written out as rows [M, d] up, in float64."""
    count, size = rows.shape
    if count <= size:
        products = (rows @ rows.mT).double()
        lengths = products.diagonal()
        sums = products.sum(1) - lengths
    else:
        products = (rows.mT @ rows).double()
        lengths = rows.double().square().sum(1)
        sums = (rows @ rows.sum(0)).double() - lengths
    squares = products.square().sum() - lengths.square().sum()
    total, margins = sums.sum(), sums.square().sum()
    return Moments(count, *torch.stack([lengths.sum(), total, squares, margins]).tolist())
