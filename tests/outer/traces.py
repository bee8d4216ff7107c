# SPDX-License-Identifier: Apache-2.0
"""Golden traces: what every recipe leaves behind, to the last bit, so that a change of structure can be seen to be one.

The arithmetic is exact, so that bits are the same on every processor, with any number of threads and any torch: losses
are linear in the parameters, data are whole numbers, rates and momenta are powers of two, and replicas two or four.
`INEXACT` cases divide by norms or multiply by shares; their weights are compared within a tolerance instead.

`python -m tests.outer.traces` writes them anew; a commit that does so says which bits have changed, and why.
"""

import hashlib
import json
import math
from pathlib import Path

import torch
from torch import nn

from farflung import Accelerator
from farflung.local_sgd import LocalSGD
from farflung.methods.arguments import OuterConfig
from farflung.outer import OuterLoop
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.recipes import OPTIONS, made

PATH = Path(__file__).parent / "traces.json"
HALVES = {"lr": 0.5, "momentum": 0.5}
EXACT = dict.fromkeys(("diloco", "streaming_diloco", "streaming_diloco without delay", "eager_diloco"), HALVES)
EXACT |= {"quadratic": {"alpha": 0.5}, "slowmo": {"beta": 0.5}, "sparse_loco": {"lr": 0.5, "beta": 0.5}}
EXACT |= {"edit": HALVES, "noloco": HALVES, "diloco average": HALVES}
RECIPES = {name: made(name, **EXACT.get(name, {})) for name in OPTIONS if name != "diloco radial"}
RECIPES["noloco without pull"] = made("noloco", pull=0, **HALVES)
RATE = 0.25  # of the inner optimizer: a round of `quadratic` above is (0.5 / 0.25)**2 = 4 steps
# Attempts of each rank; rank 1 has weights that are not finite once, rank 0 has no more data early, or both.
RUNS = {"even": (7, 7, 7, 7), "uneven": (5, 8, 7, 8), "dropped": (8, 8, 8, 8)}
BREAKS_AT = {"post_local_sgd": 5, "eager_diloco": 6}  # the step after which they are not finite, if not 4
CASES = [(name, size, kind) for name in RECIPES for size in (2, 4) for kind in RUNS]
INEXACT = [case for case in CASES if case[0] in ("sparse_loco", "edit") or case[::2] == ("eager_diloco", "uneven")]


class Sums(nn.Module):
    """A sum of linear layers, each with a running mean: outputs are linear in all parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))
        self.register_buffer("running", torch.zeros(3))
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(whole(*parameter.shape, seed=seed))

    def forward(self, inputs):
        self.running.mul_(0.5).add_(inputs.sum(0))
        return sum(layer(inputs) for layer in self.layers)


def whole(*shape, seed):
    """Whole numbers from -4 to 4."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def loss_of(model, inputs, targets):
    """A loss that is linear in the parameters."""
    return (model(inputs) * targets).sum()


def train(model, optimizer, step, rank):
    """One step, on data of this step and rank."""
    optimizer.zero_grad()
    inputs, targets = (whole(4, width, seed=1000 * step + 10 * rank + width) for width in (3, 2))
    loss_of(model, inputs, targets).backward()
    optimizer.step()


def tensors_in(node):
    """Every tensor of a nested value."""
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_in(child)]


def digest_of(node):
    """Digest all floating tensors of a nested value, in no order; both zeros are one."""
    tensors = [t.detach() + 0.0 for t in tensors_in(node) if t.is_floating_point() and t.numel()]
    digests = sorted(hashlib.blake2b(t.numpy().tobytes(), digest_size=8).hexdigest() for t in tensors)
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()


def replica(group, name, kind, island=None):
    """Train one replica; return digests, weights and the rounds that it saw."""
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    outer = OuterLoop(model, RECIPES[name], group, inner=optimizer, island=island, bucket_bytes=80)
    optimizer.register_step_pre_hook(lambda *_: outer.average_gradients())
    rounds, middle = [], ""
    outer.listeners.append(lambda r: rounds.append([r.step, r.fragment, r.dropped, r.bytes_sent, r.bytes_received]))
    breaks_at = BREAKS_AT.get(name, 4) if kind == "dropped" and group.rank == 1 else None
    for step in range(1, RUNS[kind][group.rank] + 1):
        train(model, optimizer, step, group.rank)
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            if step == breaks_at:
                for parameter in model.parameters():
                    parameter.fill_(math.nan)
            outer.step()
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.copy_(torch.where(parameter.isnan(), value, parameter))
        if step == 5:
            middle = digest_of(outer.state_dict())
    outer.flush()
    weights = dict(model.state_dict())
    digests = [digest_of(weights), middle, digest_of(outer.state_dict())]
    values = torch.cat([value.flatten() for value in weights.values()])
    return digests, [round(value, 6) for value in values.tolist()], rounds


def of_recipe(name, size, kind):
    """The trace of one run: digests and weights of each rank, and rank 0's rounds."""
    digests, weights, rounds = zip(*run_replicas(replica, size, name, kind), strict=True)
    return {"digests": list(digests), "weights": list(weights), "rounds": rounds[0]}


def golden_part(case):
    """The part of a case's trace that the file holds: digests, or weights where they are inexact."""
    left_out = "digests" if case in INEXACT else "weights"
    return {key: value for key, value in of_recipe(*case).items() if key != left_out}


def everyday_loops():
    """Three scripts on this rank, one after the other."""
    return [everyday(None), everyday(None, local_sgd=True), everyday(OuterConfig("diloco", every=3, **HALVES))]


def everyday(outer, local_sgd=False):
    """Accumulate, clip, step and schedule over two passes; return the digests of weights and losses."""
    accelerator = Accelerator(gradient_accumulation_steps=2, outer=outer)
    model = Sums()
    data = torch.utils.data.TensorDataset(whole(22, 3, seed=0), whole(22, 2, seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=local_sgd) as averaging:
        for _ in range(2):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = loss_of(model, inputs, targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_value_(model.parameters(), 4.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    averaging.step()
                losses.append(loss.detach())
    losses = accelerator.gather(torch.stack(losses))
    accelerator.end_training()
    return digest_of([dict(accelerator.unwrap_model(model).state_dict()), losses])


def of_loops():
    """The digests of the three scripts on each rank, by name."""
    names = ("DDP", "LocalSGD", "an outer loop by setting")
    return {name: {"digests": digests} for name, *digests in zip(names, *run_ranks(everyday_loops, 2), strict=True)}


if __name__ == "__main__":
    cases = {", ".join(map(str, case)): golden_part(case) for case in CASES}
    lines = [f"{json.dumps(name)}: {json.dumps(trace)}" for name, trace in (cases | of_loops()).items()]
    PATH.write_text("{" + ",\n".join(lines) + "}\n")
