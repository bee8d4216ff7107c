# SPDX-License-Identifier: Apache-2.0
"""Golden traces: what every recipe leaves behind, to the last bit, so that a change of structure can be seen to be one.

`python -m tests.outer.traces` writes them anew; a commit that does so says which bits have changed, and why.
"""

import hashlib
import json
import math
from pathlib import Path

import torch

from farflung import Accelerator
from farflung.local_sgd import LocalSGD
from farflung.outer import OuterLoop
from farflung.outer.named import OuterConfig
from farflung.testing.ranks import run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.replicas import RATE, RECIPES, net, train

PATH = Path(__file__).parent / "traces.json"
SIZES = {"hierarchical": (2, 4)}  # its groups of two need an even number; the others run on 2 and 3 replicas
# Attempts of each rank; rank 1 has weights that are not finite once, rank 0 has no more data early, or both.
RUNS = {"even": (7, 7, 7, 7), "uneven": (5, 8, 7, 8), "dropped": (8, 8, 8, 8)}
BREAKS_AT = {"post_local_sgd": 5, "eager_diloco": 6}  # the step after which they are not finite, if not 4
CASES = [(name, size, kind) for name in RECIPES for size in SIZES.get(name, (2, 3)) for kind in RUNS]


def machine():
    """What bits depend on: another processor or release of torch may sum in another order."""
    return f"torch {torch.__version__.split('+')[0]}, {torch.backends.cpu.get_cpu_capability()}"


def tensors_in(node):
    """Every tensor of a nested value."""
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_in(child)]


def digest_of(node):
    """Digest all floating tensors of a nested value, in no order."""
    tensors = [t.detach().contiguous() for t in tensors_in(node) if t.is_floating_point() and t.numel()]
    digests = sorted(hashlib.blake2b(t.numpy().tobytes(), digest_size=8).hexdigest() for t in tensors)
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()


def norm_of(node):
    """The norm of all floating tensors of a nested value, to which other machines come near."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors_in(node) if t.is_floating_point()))


def replica(group, name, kind, island=None):
    """Train one replica; return digests and the rounds that it saw."""
    model = net()
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
    return [digest_of(weights), middle, digest_of(outer.state_dict())], norm_of(weights), rounds


def of_recipe(name, size, kind):
    """The trace of one run: digests by rank, the norm of rank 0's weights, its rounds."""
    digests, norms, rounds = zip(*run_replicas(replica, size, name, kind), strict=True)
    return {"digests": list(digests), "norm": norms[0], "rounds": rounds[0]}


def everyday_loops():
    """Three scripts on this rank, one after the other."""
    return [everyday(None), everyday(None, local_sgd=True), everyday(OuterConfig("diloco", every=3, momentum=0.5))]


def everyday(outer, local_sgd=False):
    """Accumulate, clip, step and schedule over two passes; return the trace of weights and losses."""
    accelerator = Accelerator(gradient_accumulation_steps=2, outer=outer)
    model = net()
    data = torch.utils.data.TensorDataset(
        torch.linspace(-1, 1, 22 * 3).view(22, 3), torch.linspace(0, 1, 44).view(22, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=local_sgd) as averaging:
        for _ in range(2):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    loss = (model(inputs) - targets).square().mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    averaging.step()
                losses.append(loss.detach())
    losses = accelerator.gather(torch.stack(losses))
    accelerator.end_training()
    weights = dict(accelerator.unwrap_model(model).state_dict())
    return {"digests": [digest_of([weights, losses])], "norm": norm_of(weights)}


def of_loops():
    """The traces of the three scripts, by name."""
    names = ("DDP", "LocalSGD", "an outer loop by setting")
    ranks = run_ranks(everyday_loops, 2)
    return {
        name: {"digests": [trace["digests"] for trace in traces], "norm": traces[0]["norm"]}
        for name, traces in zip(names, zip(*ranks, strict=True), strict=True)
    }


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in tests: more of them sum in another order
    cases = {f"{name}, {size}, {kind}": of_recipe(name, size, kind) for name, size, kind in CASES}
    lines = [f"{json.dumps(name)}: {json.dumps(trace)}" for name, trace in (cases | of_loops()).items()]
    PATH.write_text("{" + ",\n".join([f'"machine": "{machine()}"', *lines]) + "}\n")
