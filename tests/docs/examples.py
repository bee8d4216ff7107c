# SPDX-License-Identifier: Apache-2.0
"""Examples of the names that people call: each page of reference shows its own, and a test runs them from there."""

RECIPE = """import torch
from farflung.outer import OuterLoop, {name}

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with OuterLoop(model, {name}({given})).attach(optimizer) as outer:
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
assert outer.stats().steps == 4
"""
ARGUMENTS = dict.fromkeys(("edit", "eager_diloco", "gossip", "noloco", "slowmo", "sparse_loco"), "every=2")
ARGUMENTS |= {
    "diloco": 'every=2, codec="e3m0"',
    "hierarchical": "{4: 2, 64: None}",
    "local_sgd": "2",
    "post_local_sgd": "warmup=2, every=2",
    "quadratic": "every=2, alpha=0.1",
    "streaming_diloco": "every=2, fragments=2, delay=0",
}
EXAMPLES = {f"farflung.outer.{name}": RECIPE.format(name=name, given=given) for name, given in ARGUMENTS.items()}
EXAMPLES["farflung.outer.OuterLoop"] = """import torch
from farflung.outer import OuterLoop, diloco

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with OuterLoop(model, diloco(every=2)) as outer:  # after init_process_group, if there are several processes
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    with outer.synced():  # the weights that all replicas agreed on
        model(torch.ones(1, 2))
assert outer.stats().rounds == 2
"""
EXAMPLES["farflung.elastic.Reader"] = """import tempfile

import torch
from farflung import Accelerator, notebook_launcher
from farflung.elastic import Reader
from farflung.outer import local_sgd


def train():
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.outer(model, local_sgd(every=2)):
        for _ in range(4):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
    return model


address = f"file://{tempfile.mkdtemp()}/run"
trained = notebook_launcher(train, meet=address)
for version in Reader(address):  # in another process, while the run trains or when it is over
    assert version.weights.keys() == {"weight", "bias"}
assert version.is_last and torch.equal(version.weights["weight"], trained.weight)
"""
EXAMPLES["farflung.Accelerator"] = """import torch
from farflung import Accelerator
from farflung.outer import diloco

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
with accelerator.outer(model, diloco(every=2)) as outer:  # the prepared optimizer drives it
    for _ in range(4):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
assert outer.stats().rounds == 2
accelerator.end_training()
"""
EXAMPLES["farflung.elastic.launched_membership"] = """import torch
from farflung.elastic import launched_membership
from farflung.outer import OuterLoop, diloco

membership = launched_membership()  # None without `farflung launch --elastic`
model = torch.nn.Linear(2, 1)
with OuterLoop(model, diloco(every=2), membership=membership) as outer:
    while outer.position < 4:  # a newcomer takes the position over from the others
        outer.step()
"""
EXAMPLES["farflung.elastic.place"] = """from farflung.elastic import place

part, parts = place()  # 0 of 1 without `farflung launch --elastic`
assert ["a", "b"][part::parts] == ["a", "b"]
"""
