"""The source of a plug-in of tiny variants in one file, which gates compare in tests.

Each variant adds numbers up. Like a user's file, it imports nothing but torch and the contracts.
"""

from collections.abc import Sequence

SOURCE = '''
"""Variants that add numbers up."""

import os
import sys
import time
from dataclasses import dataclass

import torch

from esbench.schema import Case
from esbench.registry import Suite, suite, variant
from esbench.workload import UnavailableError, WrongResultError, build

CASES = tuple(Case(operator="Tiny", out_channels=4, in_channels=4, members=n) for n in MEMBERS)
suite(Suite("tiny", "", cases=CASES, variants=("Tiny*",), phases=("forward",), cell_s=0.01))


class TinyWorkload:
    """Adds up the rows of its inputs."""

    noise_bytes = calls = 0

    def __init__(self, scheme, case):
        self.scheme, self.case = scheme, case
        self.generator = torch.Generator().manual_seed(1)
        self.inputs = [torch.randn(64, 64, generator=self.generator) for _ in range(2)]
        self.turn = 0
        self.phases = {"forward": self.forward}
        self.unavailable = {}
        self.ready()

    def ready(self):
        pass

    def enter(self, phase):
        self.turn = 0

    def work(self, phase):
        return None

    def forward(self):
        x = self.inputs[self.turn % 2]
        self.turn += 1
        return self.sum(x)

    def sum(self, x):
        return x.sum(dim=0)

    def verify(self):
        for x in self.inputs:
            if not torch.allclose(self.sum(x), x.sum(dim=0)):
                raise WrongResultError("the sum is off")

    def confirm(self, phase):
        self.turn = 0
        for x in self.inputs:
            x.normal_(generator=self.generator)
            if not torch.allclose(self.forward(), x.sum(dim=0)):
                raise WrongResultError("the sum is off")


@dataclass(frozen=True)
class Tiny:
    """The base class of the variants."""


@build.register
def _(scheme: Tiny, case, device, seed):
    return WORKLOADS[type(scheme).__name__](scheme, case)


WORKLOADS = {}


def tiny(workload):
    """Register a variant with this workload."""
    name = workload.__name__
    scheme = dataclass(frozen=True)(type(name, (Tiny,), {"__module__": __name__}))
    WORKLOADS[name] = workload
    variant(operators=("Tiny",))(scheme)
'''

VARIANT = """

@tiny
class {name}(TinyWorkload):
    def {method}:
{body}
"""


def correct_variant(name: str) -> str:
    """Return the source of a correct variant."""
    return variant_with(name, "ready(self)", "pass")


def variant_with(name: str, method: str, *body: str) -> str:
    """Return the source of a variant with one method of TinyWorkload replaced; ``body`` has its lines."""
    return VARIANT.format(name=name, method=method, body="\n".join(f"        {line}" for line in body))


def plugin(*variants: str, members: Sequence[int] = (8,)) -> str:
    """Return the text of a file with these variants, on one case for each number of members."""
    return SOURCE.replace("MEMBERS", repr(tuple(members))) + "".join(variants)
