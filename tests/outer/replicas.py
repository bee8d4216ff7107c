# SPDX-License-Identifier: Apache-2.0
"""What tests of the outer loop share: exact data, small models, groups that count."""

import inspect
import io
from functools import partial, wraps

import torch
from torch import nn

from farflung.outer import OuterLoop
from farflung.testing.sim import run_replicas

UNIT = 2.0**-10


def on_replicas(size=None):
    """Let each of so many replicas run a test on its `group`; None: of as many as the test's parameter `size`."""

    def decorated(test):
        @wraps(test)
        def run(**options):
            run_replicas(lambda group: test(group=group, **options), size or options["size"])

        parameters = inspect.signature(test).parameters.values()
        run.__signature__ = inspect.Signature([one for one in parameters if one.name != "group"])
        return run

    return decorated


def dyadic(*shape, seed=0, span=8):
    """Small multiples of 2**-10: few sums and products of them need more than the 24 bits of fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-span, span + 1, shape, generator=generator) * UNIT


def linear():
    """A linear model with exact weights."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(dyadic(2, 3, seed=1))
        model.bias.copy_(dyadic(2, seed=2))
    return model


def batch(step, rank):
    """Whole numbers in, exact numbers out."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randint(-2, 3, (4, 3), generator=generator).float()
    return inputs, dyadic(4, 2, seed=1000 * step + rank)


def train(model, optimizer, step, rank):
    """One step of plain least squares; its gradient is a sum of exact products."""
    inputs, targets = (x.to(next(model.parameters())) for x in batch(step, rank))
    optimizer.zero_grad()
    (0.5 * (model(inputs) - targets).square().sum()).backward()
    optimizer.step()


def values(model):
    """A copy of all parameters and buffers."""
    return {name: value.clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def shift(parameters, by):
    """Add a number to all values."""
    for parameter in parameters:
        parameter.add_(by)


def same(*models):
    """Whether dictionaries of tensors are equal bit by bit."""
    first, *others = models
    return all(
        first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)
        for other in others
    )


RATE = 0.05  # of the inner optimizer: a round of `quadratic` in the table of recipes is (0.1 / 0.05)**2 = 4 steps


def net():
    """A few layers with statistics, to be trained by `train`."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def no_statistics():
    """The same without buffers, which move even where nobody learns."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


class Run:
    """A model, its optimizer, its outer loop and the rounds that this has reported, a step at a time."""

    def __init__(self, group, recipe, make=net, lr=RATE, momentum=0.5, **options):
        self._make_another = partial(Run, group, recipe, make, lr, momentum, **options)
        self.rank, self.model, self.rounds = group.rank, make(), []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.outer = OuterLoop(self.model, recipe, group, **options).attach(self.optimizer)
        self.outer.listeners.append(self.rounds.append)

    def steps(self, *numbers):
        """Train."""
        for number in numbers:
            train(self.model, self.optimizer, number, self.rank)
        return values(self.model)

    def seen(self, *numbers):
        """Train; return what was learnt after each step."""
        return [self.steps(number) for number in numbers]

    def resumed(self):
        """Return another run that goes on from the state of this one, which went through a file."""
        outer, inner = through_a_file((self.outer.state_dict(), self.optimizer.state_dict()))
        self.outer.detach()
        another = self._make_another()
        shift(another.model.parameters(), 1.0)  # nothing may be left of what it began with
        another.outer.load_state_dict(outer)
        another.optimizer.load_state_dict(inner)
        return another

    def end(self):
        """Close, and return what was learnt."""
        self.outer.close()
        return values(self.model)


def through_a_file(state):
    """What a state is after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def kept_of(outer):
    """What each fragment keeps from round to round: its anchor, and what error feedback has kept back."""
    return [one["agreed"] for one in outer.state_dict()["rounds"]["fragments"]]


# What is written down of a call, and which of its arguments is sent.
COUNTED = {
    "broadcast": ("broadcast", 0),
    "all_gather": ("gather", 1),
    "all_to_all": ("all to all", 1),
    "swap": ("swap", 1),
    "begin_all_gather_small": ("all_gather_small", 0),
}


class Counting:
    """A group that also writes down what is handed to it."""

    def __init__(self, group, calls=None):
        self._group = group
        self.calls = [] if calls is None else calls

    def __getattr__(self, name):
        call = getattr(self._group, name)
        if name not in COUNTED:
            return call
        kind, place = COUNTED[name]

        def counted(*args):
            self.calls.append((kind, args[place].dtype, args[place].nbytes))
            return call(*args)

        return counted

    def all_reduce(self, x, op="sum"):
        self.calls.append((op, x.dtype, x.nbytes))
        return self._group.all_reduce(x, op)

    def duplicate(self, in_background=False):
        return self

    def split(self, size):
        return Counting(self._group.split(size), self.calls)

    def all_gather_small(self, x):
        return self.begin_all_gather_small(x)()

    def leave(self, reason, **details):
        self.calls.append(("leave", reason, 0))
        return self._group.leave(reason, **details)

    def reduced(self):
        """Bytes of all reductions so far."""
        return sum(size for kind, _, size in self.calls if kind in ("sum", "max"))
