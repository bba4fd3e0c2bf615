"""The error of a population that refuses a model, a scheme or an option."""


class UnsupportedError(ValueError):
    """:func:`~impls.perturbation.population.perturb` refuses its arguments; the message says why.

    A scheme raises it in ``sample`` if an option does not fit the weight's shape. A run then stores the
    variant as unavailable; any other error in a scheme is its failure.
    """
