"""Train an MLP of bits to read handwritten digits, by evolution strategies alone.

Every weight is +1 or -1, and so is every activation: a pixel comes in as the eight bits of a byte. What
learns are logits. Each of 256 members draws bits of its own by the probabilities that they stand for and
names the same digits; then every logit moves towards the bit that the better members had. Nothing is
propagated back. In the end the network has the most likely bits; beside it stands one of floats.

Example: python examples/binary_mlp.py --members 128 --steps 300
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from comparison import count, ended, parser, show
from torch import Tensor, nn
from typing_extensions import override

from impls import BinarizedLinear, Binary, perturb
from impls.binary.bits import expand
from impls.training import centred_ranks, networks


class PixelBits(nn.Module):
    """Turns pixels in 0..1, [rows, 64], into their bits: packed words of [rows, *shape], 8 bits for each."""

    def __init__(self, *shape: int) -> None:
        """Remember how pixels lie in a row."""
        super().__init__()
        self.shape = shape

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Pack them."""
        return expand((x * 255).round().to(torch.uint8).view(-1, *self.shape))


def network() -> nn.Module:
    """Make 512-128-10, whose scores are real."""
    hidden, scores = BinarizedLinear(8 * 64, 128), BinarizedLinear(128, 10, outputs="real")
    return nn.Sequential(PixelBits(64), hidden, scores)


def accuracy(model: nn.Module) -> float:
    """Return the share of the test's digits that the most likely bits name rightly."""
    digits = networks.digits()
    return float((model(digits.test_x).argmax(1) == digits.test_y).float().mean())


def evolve(model: nn.Module, options: argparse.Namespace) -> None:
    """Train the model: the loop of ``digits_mlp.py``, for members that have no mirror images."""
    digits, members, start_s = networks.digits(), options.members, time.monotonic()
    # Bits are noise by themselves; sigma is the scale of the noise of thresholds.
    population = perturb(model, Binary(), members=members, sigma=0.1, seed=options.seed)
    logits = [values for name, values in model.named_parameters() if name.endswith("weight")]
    thresholds = [values for name, values in model.named_parameters() if name.endswith("bias")]
    slower = {"params": thresholds, "lr": options.learning_rate / 5}
    optimizer = torch.optim.Adam([{"params": logits}, slower], lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    generator = torch.Generator().manual_seed(options.seed)

    for step in range(options.steps):
        batch = torch.randint(len(digits.train_y), (options.batch,), generator=generator)
        rows = batch.repeat_interleave(members)  # row = repeat * members + member
        noise = population.sample(step)
        scores = population(digits.train_x[rows], noise)
        loss = nn.functional.cross_entropy(scores, digits.train_y[rows], reduction="none")
        fitness = -loss.view(options.batch, members).mean(0)

        optimizer.zero_grad()
        population.update(noise, centred_ranks(fitness))
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for values in logits:
                values.clamp_(-5, 5)  # so that no bit is decided for good
        if step % 50 == 0:
            left_s = (time.monotonic() - start_s) / (step + 1) * (options.steps - step - 1)
            print(f"step {step}, accuracy {accuracy(model):.1%}, {left_s:.0f} s to go", file=sys.stderr)


def compare(make: Callable[[], nn.Module], floats: str, options: argparse.Namespace) -> None:
    """Train a network of bits, and one of floats by backpropagation, and print how well each reads."""
    networks.digits()  # loading them takes a second that is nobody's
    torch.set_num_threads(1)  # steps are small: threads would mostly wait for each other
    torch.manual_seed(options.seed)
    print("training the network of bits ...", file=sys.stderr)
    model, start_s = make(), time.monotonic()
    evolve(model, options)
    rows = [("evolution, of bits", accuracy(model), time.monotonic() - start_s)]
    start_s = time.monotonic()
    model = networks.trained(floats, options.seed)
    show([*rows, ("backpropagation, of floats", networks.accuracy(model), time.monotonic() - start_s)])


def arguments(description: str, *, members: int, batch: int) -> argparse.Namespace:
    """Read the command line of an example that trains bits."""
    expected = parser(description, members=members, steps=500, learning_rate=0.3, each="members")
    expected.add_argument(
        "--batch", type=count, default=batch, help=f"digits that every member sees ({batch})"
    )
    return expected.parse_args()


if __name__ == "__main__":
    options = arguments(__doc__, members=256, batch=64)
    ended(lambda: compare(network, "DigitsMLP", options))
