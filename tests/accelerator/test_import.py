# SPDX-License-Identifier: Apache-2.0
"""`from farflung import Accelerator` loads what every script needs; the rest comes when it is first used."""

from __future__ import annotations

import json
import sys

import pytest

from farflung.accelerator import lazy
from farflung.base.lazy import LazyModule
from tests.python import run_python

SCRIPT = """
import gc, json, sys
import torch
before = set(sys.modules)
collected = []
gc.callbacks.append(lambda phase, info: collected.append(info["generation"]))
gc.collect(2)
from farflung import Accelerator
print(json.dumps(sorted(set(sys.modules) - before)))
print(json.dumps([collected.count(2), gc.isenabled()]))
from farflung import LocalSGD
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters()))
print(json.dumps(any(name.startswith("farflung.outer") for name in sys.modules)))
with accelerator.outer(model, "diloco"):
    print(json.dumps("farflung.outer.engine" in sys.modules))
"""


@pytest.mark.long
def test_an_accelerator_loads_neither_the_outer_loop_nor_heavy_parts_of_torch():
    done = run_python("-c", SCRIPT)
    loaded, collector, without_loop, with_loop = map(json.loads, done.stdout.splitlines())
    others = {name.split(".")[0] for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    assert others <= {"farflung", "torch", "safetensors", "isal", "_remote_module_non_scriptable"}  # of torch
    heavy = ("checkpoint", "fsdp", "tensor", "elastic", "algorithms.ddp_comm_hooks")
    assert not [name for name in loaded if name.startswith(tuple(f"torch.distributed.{part}" for part in heavy))]
    assert not [name for name in loaded if name.startswith(("torch._dynamo", "torch._inductor", "torch.onnx"))]
    assert not [
        name for name in loaded if name.startswith(("farflung.outer", "farflung.config.launch", "farflung.launch"))
    ]
    # The script's own call, at its start and its end, alone: another one would look through all of torch, in 0.08 s.
    assert collector == [2, True]
    assert not without_loop
    assert with_loop


def test_what_is_loaded_late_is_there():
    modules = [module for module in vars(lazy).values() if isinstance(module, LazyModule)]
    assert modules
    assert all(module.__file__ for module in modules)  # which is asked of the module itself
