"""Where a stream's numbers are, as kernels that draw them again are told."""

from typing import TYPE_CHECKING

from impls.perturbation.noise import NoiseStream
from impls.perturbation.philox import Place

if TYPE_CHECKING:
    from impls.kernels.drawn import Draw


def draw_of(stream: NoiseStream, name: str) -> "Draw":
    """Return what a kernel has to know to draw what the stream does under this name."""
    from impls.kernels.drawn import Draw

    place = Place.of(stream.seed, stream.step, stream.layer, name)
    return Draw(place.key, place.layer, place.draw, stream.members)
