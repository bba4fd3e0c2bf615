"""What kernels ask of shared cores."""


def check_one_core(cores: int) -> None:
    """Refuse several cores.

    Raises:
        ValueError: with the reason.

    """
    if cores != 1:
        message = (
            f"cores must be 1 for a kernel, got {cores!r}: members take cores in turn, so the rows of one "
            "tile would meet all of them, each in a product of its own"
        )
        raise ValueError(message)
