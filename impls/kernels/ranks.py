"""Ranks of low-rank noise that kernels take."""

MOST_RANK = 32
"""Of factors that rows of the smallest tile meet without leaving registers, in every type."""


def check_rank(rank: int) -> None:
    """Refuse a rank that no kernel takes.

    Raises:
        ValueError: with the reason.

    """
    if rank & (rank - 1):
        message = f"a kernel takes a rank that is a power of two, got {rank}"
        raise ValueError(message)
    if rank > MOST_RANK:
        message = f"a kernel takes a rank of at most {MOST_RANK}, got {rank}"
        raise ValueError(message)
