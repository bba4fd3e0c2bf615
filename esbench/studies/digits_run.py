"""The digits study: every variant trains the same small networks, one training after another."""

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from esbench.errors import UserError
from esbench.measure.environment import differences, source_hashes
from esbench.measure.failure import classify
from esbench.progress import Show
from esbench.registry import Entry
from esbench.schema import OUT_OF_MEMORY, Environment
from esbench.store import new_run_id
from esbench.studies.digits import SCHEMA, Recipe, Study, Training, Untrained, train

HARNESS = "esbench"


def begin(
    entries: Sequence[Entry], recipes: Sequence[Recipe], seeds: Sequence[int], environment: Environment
) -> Study:
    """Return a study in which nothing is trained yet."""
    now = datetime.now(UTC)
    return Study(
        schema=SCHEMA,
        study_id=new_run_id("digits", now),
        started=now.isoformat(timespec="seconds"),
        recipes=tuple(recipes),
        seeds=tuple(seeds),
        variants=tuple(entry.variant for entry in entries),
        environment=environment,
        code=_code(entries),
    )


def hold_to(study: Study, entries: Sequence[Entry], environment: Environment) -> list[Entry]:
    """Return the entries that a study which was cut off still has to do with.

    Raises:
        UserError: it has all its trainings, or the rest would be trained with other code or elsewhere.

    """
    if not study.left():
        message = f"{study.study_id} has all its trainings: there is nothing to resume"
        raise UserError(message)
    own = [entry for entry in entries if entry.variant in study.variants]
    code = _code(own)
    found = differences(study.environment, environment)
    found += [f"the code of {name}" for name in study.code if study.code[name] != code.get(name)]
    if found:
        message = (
            f"study {study.study_id} cannot be resumed, it would mix two: {'; '.join(found)}: train again"
        )
        raise UserError(message)
    return own


def conduct(study: Study, entries: Sequence[Entry], progress: Show, keep: Callable[[Study], object]) -> Study:
    """Train what is left of a study, and hand it to ``keep`` after each training.

    A variant that cannot be trained is noted with its reason, and the study goes on.
    """
    schemes = {entry.variant: entry.scheme for entry in entries}
    total = len(study.trainings) + len(study.left())
    while left := study.left():
        seed, recipe, variant = left[0]
        progress(total - len(left), total, f"{recipe.network} {variant.name} seed {seed}")
        start_s = time.monotonic()
        try:
            outcome = train(schemes[variant], recipe, seed, study.environment.device)
        except UserError:  # what a person has to mend first, such as a package that is missing
            raise
        except Exception as error:  # noqa: BLE001  whatever a variant raises is its row's reason
            fault = classify(error)
            # A machine that is too small for one variant has not held it to the others.
            failed = fault.status == "failed" or fault.reason.startswith(OUT_OF_MEMORY)
            row = Untrained(variant=variant, network=recipe.network, reason=fault.reason, failed=failed)
            study = msgspec.structs.replace(study, untrained=(*study.untrained, row))
        else:
            training = Training(
                variant=variant,
                network=recipe.network,
                seed=seed,
                outcome=outcome,
                wall_s=time.monotonic() - start_s,
            )
            study = msgspec.structs.replace(study, trainings=(*study.trainings, training))
        keep(study)
    return study


def _code(entries: Sequence[Entry]) -> dict[str, str]:
    """Hashes of what trains: the schemes and their packages, and not of the harness, which only looks on."""
    return {name: code for name, code in source_hashes(entries).items() if name != HARNESS}
