"""The options of a scheme, held to what they may be."""


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no int of at least so much.

    Raises:
        ValueError: with the option's name and what it was.

    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        message = f"{name} must be an int of at least {least}, got {value!r}"
        raise ValueError(message)


def check_choice(name: str, value: object, *choices: str) -> None:
    """Refuse what is none of the choices.

    Raises:
        ValueError: with the option's name and what it was.

    """
    if value not in choices:
        *most, last = map(repr, choices)
        message = f"{name} must be {', '.join(most)} or {last}, got {value!r}"
        raise ValueError(message)


def check_probability(name: str, value: object) -> None:
    """Refuse what is no number between 0 and 1.

    Raises:
        ValueError: with the option's name and what it was.

    """
    if not isinstance(value, int | float) or not 0 < value < 1:
        message = f"{name} must be a number between 0 and 1, got {value!r}"
        raise ValueError(message)


def check_share(name: str, value: object) -> None:
    """Refuse what is neither a share of channels, above 0 and at most 1, nor a number of them, an int.

    Raises:
        ValueError: with the option's name and what it was.

    """
    is_share = isinstance(value, float) and 0 < value <= 1
    if isinstance(value, bool) or not (is_share or (isinstance(value, int) and value >= 1)):
        message = f"{name} must be in (0, 1], or an int of at least 1 for a number of channels, got {value!r}"
        raise ValueError(message)
