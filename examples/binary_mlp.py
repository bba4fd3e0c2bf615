"""Train a binarized MLP to classify handwritten digits by evolution strategies alone.

Weights and activations are +1 or -1; a pixel is read as the eight bits of a byte. The parameters are logits.
Each of 256 members draws its own bits with the probabilities of the logits and classifies the same digits;
then every logit moves towards the bit of the better members. Nothing is backpropagated. The trained network
has the most likely bits; it is compared with a network of floats that is trained by backpropagation.

Example: python examples/binary_mlp.py --members 128 --steps 300
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
from comparison import accuracy, count, parser, run_example, show
from torch import Tensor, nn
from typing_extensions import override

from impls import BinarizedLinear, Binary, centered_ranks, perturb
from impls.binary.bits import expand
from impls.training import networks


class PixelBits(nn.Module):
    """Reads pixels in 0..1 as bytes, whose eight bits are the channels of packed activations.

    Pixels [rows, 64] are viewed as [rows, *shape] first, where the last axis has the channels of one word.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    @override
    def forward(self, x: Tensor) -> Tensor:
        return expand((x * 255).round().to(torch.uint8).view(-1, *self.shape))


def network() -> nn.Module:
    """Return the MLP 512-128-10 with real scores."""
    hidden, scores = BinarizedLinear(8 * 64, 128), BinarizedLinear(128, 10, outputs="real")
    return nn.Sequential(PixelBits(64), hidden, scores)


def evolve(model: nn.Module, options: argparse.Namespace) -> None:
    """Train the model: the loop of ``digits_mlp.py`` without antithetic sampling."""
    digits, members, start_s = networks.digits(), options.members, time.monotonic()
    # sigma scales the noise of the thresholds only: bits are drawn from their probabilities.
    population = perturb(model, Binary(), members=members, sigma=0.1, seed=options.seed)
    logits = [values for name, values in model.named_parameters() if name.endswith("weight")]
    thresholds = [values for name, values in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": logits}, {"params": thresholds, "lr": options.learning_rate / 5}]
    optimizer = torch.optim.Adam(groups, lr=options.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    generator = torch.Generator().manual_seed(options.seed)

    for step in range(options.steps):
        batch = torch.randint(len(digits.train_y), (options.batch,), generator=generator)
        rows = batch.repeat_interleave(members)  # row = repeat * members + member
        noise = population.sample(step)
        scores = population(digits.train_x[rows], noise=noise)
        loss = nn.functional.cross_entropy(scores, digits.train_y[rows], reduction="none")
        fitness = -loss.view(options.batch, members).mean(0)

        optimizer.zero_grad()
        population.update(noise, centered_ranks(fitness))
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for values in logits:
                values.clamp_(-5, 5)  # so that every bit can still change
        if step % 50 == 0:
            remaining_s = (time.monotonic() - start_s) / (step + 1) * (options.steps - step - 1)
            print(f"step {step}, accuracy {accuracy(model):.1%}, {remaining_s:.0f} s to go", file=sys.stderr)


def compare(make_network: Callable[[], nn.Module], float_network: str, options: argparse.Namespace) -> None:
    """Train a binarized network, and a network of floats by backpropagation, and print their accuracies."""
    networks.digits()  # not timed: loading takes a second
    torch.set_num_threads(1)  # small steps: several threads would mostly wait
    torch.manual_seed(options.seed)
    print("training the binarized network ...", file=sys.stderr)
    model, start_s = make_network(), time.monotonic()
    evolve(model, options)
    rows = [("evolution, bits", accuracy(model), time.monotonic() - start_s)]
    start_s = time.monotonic()
    model = networks.trained(float_network, options.seed)
    show([*rows, ("backpropagation, floats", networks.accuracy(model), time.monotonic() - start_s)])


def arguments(description: str, *, members: int, batch: int) -> argparse.Namespace:
    """Read the command line of an example of binarized networks."""
    command_line = parser(description, members=members, steps=500, learning_rate=0.3, each="members")
    batch_help = f"digits per member and step ({batch})"
    command_line.add_argument("--batch", type=count, default=batch, help=batch_help)
    return command_line.parse_args()


if __name__ == "__main__":
    options = arguments(__doc__, members=256, batch=64)
    run_example(lambda: compare(network, "DigitsMLP", options))
