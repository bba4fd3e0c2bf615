"""Records of the digits study: how well a small network learns with each variant.

A study is one JSON file, ``<results>/<device>/digits/<study id>.json``, which is rewritten after every
training. Nothing here imports torch.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from esbench import store
from esbench.errors import UserError
from esbench.registry import UnavailableError, trainer
from esbench.schema import Environment, Outcome, Recipe, Variant

SCHEMA = 1
FOLDER = "digits"
"""The folder of the studies in a device's results."""


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record whose decoding rejects unknown fields."""


class Training(_Strict, frozen=True, kw_only=True):
    """One training of a network with a variant from a seed."""

    variant: Variant
    network: str
    seed: int
    outcome: Outcome
    wall_s: float


class Untrained(_Strict, frozen=True, kw_only=True):
    """A variant that could not be trained; ``failed`` unless the scheme does not support the network."""

    variant: Variant
    network: str
    reason: str
    failed: bool = False


class Study(_Strict, frozen=True, kw_only=True):
    """All finished trainings of a study and their environment.

    ``code``: name -> hash of the source of each variant and of its package.
    """

    schema: int
    study_id: str
    started: str
    recipes: Annotated[tuple[Recipe, ...], msgspec.Meta(min_length=1)]
    seeds: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]
    variants: tuple[Variant, ...]
    environment: Environment
    code: dict[str, str] = {}
    trainings: tuple[Training, ...] = ()
    untrained: tuple[Untrained, ...] = ()

    def left(self) -> list[tuple[int, Recipe, Variant]]:
        """Return the unfinished trainings: all variants with the first seed, then with the next."""
        done = {(one.seed, one.network, one.variant) for one in self.trainings}
        without = {(one.network, one.variant) for one in self.untrained}
        return [
            (seed, recipe, variant)
            for seed in self.seeds
            for recipe in self.recipes
            for variant in self.variants
            if (seed, recipe.network, variant) not in done and (recipe.network, variant) not in without
        ]


def train(scheme: object, recipe: Recipe, seed: int, device: str) -> Outcome:
    """Train a network with a registered scheme.

    Raises:
        UnavailableError: the scheme does not support the network, or its package does not train.

    """
    found = trainer(scheme)
    if found is None:
        message = f"no training of {recipe.network} is known for {type(scheme).__name__}"
        raise UnavailableError(message)
    return found.train(scheme, recipe, seed, device)


def study_path(study: Study, results: Path) -> Path:
    """Return the file of a study."""
    return results / study.environment.slug / FOLDER / f"{study.study_id}.json"


def write_study(study: Study, results: Path) -> Path:
    """Replace the file of a study atomically."""
    return store.write_document(study, study_path(study, results))


def newest_study(results: Path, device: str) -> Study:
    """Read the newest study of a device.

    Raises:
        UserError: there is no study, or it is invalid.

    """
    paths = sorted((results / device / FOLDER).glob("*.json"))
    if not paths:
        message = f"no digits study in {results / device / FOLDER}: train with `esbench digits`"
        raise UserError(message)
    return store.read_document(paths[-1], Study, what="digits study", schema=SCHEMA, again="train again")


def newest_studies(results: Path) -> list[Study]:
    """Read the newest study of each device, in the order of their folders.

    Raises:
        UserError: a study is invalid.

    """
    return [newest_study(results, path.parent.name) for path in sorted(results.glob(f"*/{FOLDER}"))]
