"""Families of schemes, as in plots, on the page and in lists."""

_FAMILY_OF = {
    "Perturbed": "dense noise",
    "Regenerated": "dense noise",
    "RegeneratedSign": "dense noise",
    "NoiseTable": "dense noise",
    "LowRank": "low rank",
    "LowRankSign": "low rank",
    "AddmmLowRank": "low rank",
    "Orthogonal": "low rank",
    "SparsePerturbed": "sparse",
    "Permuted": "shared core",
    "Flipped": "shared core",
    "FlippedSign": "shared core",
    "Hadamard": "shared core",
    "DropoutMask": "dropout",
    "DropConnect": "dropout",
    "DropoutBlocks": "dropout",
}
FAMILIES = tuple(dict.fromkeys(_FAMILY_OF.values()))


def family(scheme: str) -> str:
    """Return the family of a scheme. ``FusedX`` is in the family of ``X``."""
    return _FAMILY_OF.get(scheme.removeprefix("Fused"), "other")
