"""Run the digits study: train the same small networks with every variant."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from esbench.errors import UserError
from esbench.measure.environment import differences, source_hashes
from esbench.measure.failure import classify
from esbench.progress import Show
from esbench.registry import Entry
from esbench.schema import OUT_OF_MEMORY, Environment, Outcome, Recipe, Variant
from esbench.store import new_run_id
from esbench.studies import tasks
from esbench.studies.digits import FILES, Study, TrainingRun, Untrained
from esbench.workload import Trainer, UnavailableError, trainer


def trainer_of(scheme: object) -> Trainer:
    """Return the trainer of a scheme; raise an UnavailableError if its package does not train."""
    found = trainer(scheme)
    if found is None:
        raise UnavailableError(
            f"{type(scheme).__name__} cannot be trained: its package registers no esbench.workload.trainer"
        )
    return found


def train(scheme: object, recipe: Recipe, seed: int, device: str) -> Outcome:
    """Train a network with a registered scheme.

    Raises:
        UnavailableError: the scheme does not support the network, or its package does not train.
    """
    return trainer_of(scheme).train(scheme, recipe, seed, device)


def begin(
    entries: Sequence[Entry], recipes: Sequence[Recipe], seeds: Sequence[int], environment: Environment
) -> Study:
    """Return a study without training runs."""
    start = datetime.now(UTC)
    return Study(
        schema=FILES.schema,
        study_id=new_run_id("digits", start),
        started=start.isoformat(timespec="seconds"),
        recipes=tuple(recipes),
        seeds=tuple(seeds),
        variants=tuple(entry.variant for entry in entries),
        environment=environment,
        code=code_of(entries),
    )


def check_resumable(study: Study | tasks.Study, entries: Sequence[Entry], environment: Environment) -> None:
    """Check that an incomplete study can be continued with the same code in the same environment.

    Raises:
        UserError: the study is complete, or the code or the environment differs.
    """
    if study.is_complete:
        raise UserError(f"{study.study_id} is complete: there is nothing to resume")
    code = code_of([entry for entry in entries if entry.variant in study.variants])
    if changes := differences(study.environment, environment, study.code, code):
        raise UserError(
            f"{study.study_id} cannot be resumed, because this changed: {'; '.join(changes)}; "
            "start a new study without --resume"
        )


def conduct(study: Study, entries: Sequence[Entry], progress: Show, results: Path) -> Study:
    """Run the remaining training runs of a study, and write its file after each.

    A variant that cannot be trained is recorded with its reason.
    """
    schemes = {entry.variant: entry.scheme for entry in entries}
    total = len(study.training_runs) + len(study.remaining_runs())
    while unfinished := study.remaining_runs():
        seed, recipe, variant = unfinished[0]
        network = recipe.network
        progress(total - len(unfinished), total, f"{network} {variant.name} seed {seed}")
        start_s = time.monotonic()
        try:
            outcome = train(schemes[variant], recipe, seed, study.environment.device)
        except UserError:  # for example a missing package
            raise
        except Exception as error:  # noqa: BLE001  any error of a variant is its reason
            untrained = why_untrained(variant, network, error)
            study = msgspec.structs.replace(study, untrained=(*study.untrained, untrained))
        else:
            wall_s = time.monotonic() - start_s
            run = TrainingRun(variant=variant, network=network, seed=seed, outcome=outcome, wall_s=wall_s)
            study = msgspec.structs.replace(study, training_runs=(*study.training_runs, run))
        FILES.write(study, results)
    return study


def why_untrained(variant: Variant, network: str, error: BaseException) -> Untrained:
    """Return the record of a variant that cannot be trained on a network or task."""
    fault = classify(error)
    # Running out of memory counts as a failure: the variant was not compared.
    failed = fault.status == "failed" or fault.reason.startswith(OUT_OF_MEMORY)
    return Untrained(variant=variant, network=network, reason=fault.reason, failed=failed)


def code_of(entries: Sequence[Entry]) -> dict[str, str]:
    """Return hashes of the schemes and their packages, without the harness."""
    return {name: code for name, code in source_hashes(entries).items() if name != "esbench"}
