"""The time of a step with many forwards: in reinforcement learning one draw of noise serves a rollout."""

from statistics import fmean

import msgspec

from esbench.schema import Measurement, Row, Run, Skipped, Work


def with_forwards_per_step(run: Run, forwards: int) -> Run:
    """Return a run as if each step had this many forwards; it is measured with a single one.

    A sample of the step becomes its own time plus ``forwards - 1`` times the mean of the forward in the round
    of the same number; a mean, because the forwards of a rollout add up. The variants of a co-resident group
    share the rounds of both phases, so ratios are still taken within a round. A step whose forward was not
    measured by the same method gets a reason instead. If base has no step, its forward is left out, as it
    would be compared with many forwards.
    """
    if forwards == 1:
        return run
    times = {_key(row): row for row in run.measurements if row.phase == "forward"}
    with_step = {(row.variant, row.case) for row in run.measurements if row.phase == "step"}
    rows: list[Row] = []
    for row in run.rows:
        if not isinstance(row, Measurement):
            rows.append(row)
        elif row.phase == "step" and row.metric.endswith("_ns"):
            forward = times.get(_key(row))
            rows.append(_combine(row, forward, forwards) if forward else _without_forward(row))
        elif not (row.variant.mode == "base" and (row.variant, row.case) not in with_step):
            rows.append(row)
    return msgspec.structs.replace(run, rows=tuple(rows))


def _key(row: Measurement) -> object:
    return row.variant, row.case, row.metric, row.method, row.group


def _combine(step: Measurement, forward: Measurement, forwards: int) -> Measurement:
    """Return the row of a step with the times of its other forwards added, for the rounds that both have."""
    samples = tuple(
        tuple(sample + (forwards - 1) * fmean(forward_samples) for sample in step_samples if forward_samples)
        for step_samples, forward_samples in zip(step.samples, forward.samples, strict=False)
    )
    count = len(samples)
    return msgspec.structs.replace(
        step,
        samples=samples,
        work=_combine_work(step.work, forward.work, forwards),
        labels=(*step.labels, f"combined: a step and {forwards - 1} forwards"),
        positions=step.positions[:count],
        conditions=step.conditions[:count],
    )


def _combine_work(step: Work | None, forward: Work | None, forwards: int) -> Work | None:
    if step is None or forward is None:
        return None
    return msgspec.structs.replace(
        step,
        flops=step.flops + (forwards - 1) * forward.flops,
        moved_bytes=step.moved_bytes + (forwards - 1) * forward.moved_bytes,
    )


def _without_forward(step: Measurement) -> Skipped:
    return Skipped(
        variant=step.variant,
        case=step.case,
        phase="step",
        status="unavailable",
        reason="a step with more forwards needs the time of the forward, which was not measured",
        method=step.method,
    )
