"""Train a small CNN to classify handwritten digits by evolution strategies, with three schemes in turn.

The schemes perturb convolutions as they perturb linear layers. The training loop is that of
``digits_mlp.py``, which is also ``impls.training.evolve``.

Example: python examples/digits_cnn.py --scheme LowRank --members 256
"""

import argparse

from comparison import arguments, compare, run_example
from torch import nn

from esbench.schema import Recipe
from impls import perturb
from impls.perturbation.scheme import AnyScheme
from impls.training import evolve, networks


def evolve_images(model: nn.Module, scheme: AnyScheme, options: argparse.Namespace) -> None:
    """Train the model on images [rows, 1, 8, 8] with the training loop of the library."""
    digits = networks.digits()
    population = perturb(
        model, scheme, members=options.members, sigma=options.sigma, antithetic=True, seed=options.seed
    )
    recipe = Recipe(
        network="DigitsCNN",
        members=options.members,
        steps=options.steps,
        batch=options.batch,
        sigma=options.sigma,
        learning_rate=options.learning_rate,
    )
    images = digits.train_x.view(-1, 1, 8, 8)
    evolve(population, recipe, images, digits.train_y, options.seed)


if __name__ == "__main__":
    options = arguments(__doc__, steps=160, batch=16, sigma=0.1, learning_rate=0.05)
    run_example(lambda: compare("DigitsCNN", evolve_images, options))
