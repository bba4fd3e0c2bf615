"""How two runs differ before any row is looked at: their devices, versions, code, seeds and disturbances."""

import msgspec

from esbench.schema import Environment, Run

_SAME_DEVICE = ("device_name", "cpu", "threads", "device_memory_bytes")
_PASSING = frozenset({"idle_w", "memory_bytes"})
"""What differs from one run to the next and changes no time."""


def different_devices(a: Run, b: Run, words: str = "A ran on {}, B on {}") -> str:
    """What tells the devices apart, in these words, nothing where they are alike.

    A name is not enough: processor, threads, memory and whether it is a whole GPU or a slice of one
    (the kind of its UUID, ``GPU`` or ``MIG``) count too, as far as both runs say them.
    """
    here, there = (_device(run.header.environment) for run in (a, b))
    apart = [name for name in here if here[name] != there[name] and None not in {here[name], there[name]}]
    sides = (", ".join(_said(name, device[name]) for name in apart) for device in (here, there))
    return words.format(*sides) if apart else ""


def differences(a: Run, b: Run) -> dict[str, tuple[object, object]]:
    """What else is not the same: fields of the environment, the seed, and the code of variants in both."""
    here, there = _facts(a), _facts(b)
    both = {name: (here[name], there[name]) for name in here if name in there}
    return {name: values for name, values in both.items() if values[0] != values[1]}


def invalid(a: Run, b: Run) -> str:
    """Why the figures of one or both must not be used, nothing where they may."""
    found = [
        f"{name}: {'; '.join(run.end.invalid)}"
        for name, run in (("A", a), ("B", b))
        if run.end and run.end.invalid
    ]
    return ". ".join(found)


def _device(here: Environment) -> dict[str, object]:
    kind = here.uuid.partition("-")[0] if here.uuid else None
    return {name: getattr(here, name) for name in _SAME_DEVICE} | {"kind": kind}


def _said(name: str, value: object) -> str:
    return str(value) if name == "device_name" else f"{name} {value}"


def _facts(run: Run) -> dict[str, object]:
    facts: dict[str, object] = {"seed": run.header.seed}
    facts |= {
        name: value
        for name, value in msgspec.structs.asdict(run.header.environment).items()
        if name not in _PASSING
    }
    return facts | {f"code of {variant}": digest for variant, digest in run.header.code.items()}
