# SPDX-License-Identifier: Apache-2.0
"""Compiling inside `prepare`: it changes how a model computes, never what it is called or what comes out.

A model can see whether its code is being compiled, so `Told` answers with another sign when it is.
"""

import copy
import inspect
import shutil
from functools import partial

import pytest
import torch
from accelerate.utils import (
    TorchDynamoPlugin as TheirPlugin,
    compile_regions as their_regions,
    extract_model_from_parallel as their_extract,
)
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from farflung import Accelerator, LocalSGD
from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.state import AcceleratorState
from farflung.utils import (
    DistributedDataParallelKwargs,
    DynamoBackend,
    TorchDynamoPlugin,
    compile_regions,
    extract_model_from_parallel,
    has_compiled_regions,
    is_compiled_module,
)
from tests.accelerator.conftest import on_ranks

# torch hides this warning of its own where it looks at what comes from one region into the next, unless it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def fresh_states():
    torch._dynamo.reset()
    counters.clear()


def compiling(**settings):
    return Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin("eager"), **settings)


def by_regions(**settings):
    plugin = TorchDynamoPlugin("eager", use_regional_compilation=True)
    return Accelerator(cpu=True, dynamo_plugin=plugin, **settings)


class Told(nn.Module):
    """Adds a layer's output, or takes it away where it is compiled."""

    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return x - self.layer(x) if torch.compiler.is_compiling() else x + self.layer(x)


class Deep(nn.Module):
    def __init__(self, depth=3, num_heads=2):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList([Told() for _ in range(depth)])
        self.heads = nn.ModuleDict({str(width): nn.Linear(4, width) for width in range(1, 1 + num_heads)})

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return torch.cat([head(x) for head in self.heads.values()], dim=-1)


def num_graphs():
    return counters["stats"]["unique_graphs"]


# ---- the plugin


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ({}, {}),
        ({"backend": "inductor"}, {}),
        ({"backend": "EAGER", "mode": "default", "fullgraph": True, "dynamic": False, "disable": True}, {}),
        ({"backend": "aot_eager", "options": {"a": 1}, "use_regional_compilation": True}, {}),
        ({}, {"BACKEND": "aot_eager", "MODE": "max-autotune", "USE_FULLGRAPH": "true", "USE_DYNAMIC": "no"}),
        ({"mode": "reduce-overhead", "fullgraph": False}, {"BACKEND": "INDUCTOR", "USE_REGIONAL_COMPILATION": "1"}),
    ],
)
def test_the_plugin_reads_as_accelerates(arguments, variables):
    with environ.patched({f"ACCELERATE_DYNAMO_{name}": value for name, value in variables.items()}):
        theirs, ours = TheirPlugin(**arguments), TorchDynamoPlugin(**arguments)
        assert ours.to_dict() == theirs.to_dict()
        assert ours.to_kwargs() == theirs.to_kwargs()
        assert ours.backend.value == theirs.backend.value


# ---- one process


def test_a_prepared_model_is_compiled_and_keeps_its_names():
    model, x = Told(), torch.ones(2, 4)
    names, expected = list(model.state_dict()), x - model.layer(x)
    accelerator = Accelerator(cpu=True, dynamo_backend=DynamoBackend.EAGER)
    prepared = accelerator.prepare(model)
    assert torch.equal(prepared(x), expected)
    assert is_compiled_module(prepared)
    assert accelerator.unwrap_model(prepared) is model
    for state in (prepared.state_dict(), accelerator.get_state_dict(prepared), dict(prepared.named_parameters())):
        assert list(state) == names


def test_compiling_leaves_the_precision_of_matrix_products_alone():
    before = torch.backends.cuda.matmul.allow_tf32
    compiling()
    assert torch.backends.cuda.matmul.allow_tf32 is before


@pytest.mark.parametrize("variables", [{}, {"ACCELERATE_DYNAMO_BACKEND": "EAGER"}])
def test_nothing_is_compiled_unless_the_environment_or_a_setting_asks_for_it(variables):
    with environ.patched(variables):
        model = Accelerator(cpu=True).prepare(Told())
    model(torch.ones(2, 4))
    assert is_compiled_module(model) is bool(variables)
    assert num_graphs() == len(variables)


@pytest.mark.parametrize("make", [compiling, by_regions])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_unwrapping_without_compile_gives_a_plain_duplicate_of_the_same_tensors(make, precision):
    accelerator = make(mixed_precision=precision)
    x = torch.arange(6)
    model = accelerator.prepare(Deep())
    compiled = model(x)
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert not has_compiled_regions(plain)
    assert not torch.equal(plain(x), compiled)  # it is told that it is not compiled
    assert all(a is b for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert list(plain.state_dict()) == list(model.state_dict())
    assert torch.equal(model(x), compiled)
    assert plain(x).dtype == torch.float32
    full = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert full.embed(x).dtype == torch.float32
    assert accelerator.unwrap_model(plain, keep_torch_compile=False) is plain


@pytest.mark.parametrize(
    ("make", "net"), [(compiling, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())), (by_regions, Told)]
)
def test_torchs_own_classes_are_compiled_too_and_a_model_without_repeated_blocks_is_one_region(make, net):
    model = make().prepare(net())
    model(torch.ones(1, 4))
    assert is_compiled_module(model)
    assert num_graphs() == 1


def test_regions_compile_equal_blocks_once_and_every_other_part_by_itself():
    counts_apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters  # else eight forms are the most
    model, x = by_regions().prepare(Deep(depth=12, num_heads=10 if counts_apart else 6)), torch.arange(6)
    assert not is_compiled_module(model)
    assert has_compiled_regions(model)
    assert all(map(is_compiled_module, [model.embed, *model.blocks, *model.heads.values()]))
    model(x).sum().backward()
    assert num_graphs() == 2 + len(model.heads)  # the embedding, one for all blocks, and each head
    with torch.compiler.set_stance("fail_on_recompile"):
        model(x).sum().backward()


def test_what_is_compiled_already_is_left_as_it_is():
    wrapped = torch.compile(Told(), backend="eager")
    accelerator = compiling()
    assert accelerator.prepare(wrapped) is wrapped
    assert wrapped._orig_mod._compiled_call_impl is None
    assert accelerator.unwrap_model(wrapped) is wrapped
    assert accelerator.unwrap_model(wrapped, keep_torch_compile=False) is wrapped._orig_mod
    assert list(accelerator.get_state_dict(wrapped)) == ["layer.weight", "layer.bias"]


def epoch(accelerator, model, optimizer, batches):
    """Train on batches, and evaluate."""
    for x in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(batches[0])
    model.train()


@pytest.mark.long
def test_training_is_the_same_and_nothing_is_compiled_twice():
    def trained(accelerator):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))

        epoch(accelerator, model, optimizer, [torch.full((2, 4), step / 4) for step in range(4)])
        with torch.compiler.set_stance("fail_on_recompile"):
            epoch(accelerator, model, optimizer, [torch.full((2, 4), step / 4) for step in range(4)])
        return [parameter.detach().clone() for parameter in model.parameters()]

    for precision in ("no", "bf16"):
        settings = {"cpu": True, "gradient_accumulation_steps": 2, "mixed_precision": precision}
        plain = trained(Accelerator(**settings))
        AcceleratorState._reset_state()
        compiled = trained(Accelerator(**settings, dynamo_backend="aot_eager"))
        assert num_graphs() > 0
        assert all(map(torch.equal, plain, compiled))
        AcceleratorState._reset_state()


def test_copies_and_pickles_of_a_compiled_model_are_plain_models_of_their_own():
    model = compiling(mixed_precision="bf16").prepare(Told())
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        nn.init.zeros_(parameter)
    x = torch.ones(1, 4)
    assert not is_compiled_module(copied)
    assert torch.equal(copied(x), x)
    assert not torch.equal(model(x), x)


# ---- the public functions


def test_compile_regions_returns_a_duplicate_and_leaves_the_model_alone():
    model, x = Deep(), torch.arange(6)
    before = model(x)
    compiled = compile_regions(model, backend="eager")
    assert type(compiled) is Deep
    assert compiled._orig_mod is model
    assert compiled.blocks[0]._orig_mod is model.blocks[0]
    assert not has_compiled_regions(model)
    assert all(map(is_compiled_module, compiled.blocks))
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert not torch.equal(compiled(x), before)
    assert torch.equal(model(x), before)
    assert extract_model_from_parallel(compiled) is compiled
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    with pytest.raises(ConfigError, match="already compiled"):
        compile_regions(compiled)


class Lists(nn.Module):
    def __init__(self, others):
        super().__init__()
        self.blocks = nn.ModuleList([Told(), Told()])
        self.others = others

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        for one in self.others:
            x = self.others[one](x) if isinstance(one, str) else one(x)
        return x


@pytest.mark.parametrize(
    "others", [nn.ModuleDict({"a": nn.Linear(4, 4)}), nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])], ids=type
)
def test_lists_of_different_modules_can_still_be_gone_through(others):
    x = torch.ones(1, 4)
    compiled = compile_regions(Lists(others), backend="eager")
    compiled(x)
    assert all(map(is_compiled_module, compiled.others.children()))
    with pytest.raises(TypeError, match="not iterable"):
        their_regions(Lists(others), backend="eager")(x)


def test_modules_that_a_region_shares_stay_shared():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    model["again"] = model["head"]
    compiled = compile_regions(model, backend="eager")
    assert compiled["again"] is compiled["head"]
    assert compiled["head"].weight is model["head"].weight


def test_unwrapping_leaves_a_compiled_wrapper_as_it_is():
    model = Told()
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    their_wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    their_extract(their_wrapped)
    assert their_wrapped._orig_mod is model  # so that nobody finds its no_sync any more
    kept = extract_model_from_parallel(wrapped)
    assert is_compiled_module(kept)
    assert kept._orig_mod is model
    assert isinstance(wrapped._orig_mod, nn.DataParallel)
    assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is model
    x = torch.ones(1, 4, device=model.layer.weight.device)  # DataParallel moves it to a GPU
    assert torch.equal(kept(x), x - model.layer(x))


def test_nested_compiled_parts_are_found_and_undone():
    model = nn.Sequential(torch.compile(Told(), backend="eager"), nn.Linear(4, 1))
    assert has_compiled_regions(model)
    assert not is_compiled_module(model)
    assert has_compiled_regions(their_extract(model, keep_torch_compile=False))
    plain = extract_model_from_parallel(model, keep_torch_compile=False)
    assert not has_compiled_regions(plain)
    assert list(plain.state_dict()) == ["0.layer.weight", "0.layer.bias", "1.weight", "1.bias"]


# ---- two processes


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(600, 600), nn.Tanh())))
        self.norm = nn.BatchNorm1d(600)

    def forward(self, x):
        return self.norm(self.layers(x))


def trained_on_ranks(backend, precision):
    """Weights after windows of 2, evaluations and rounds of local SGD."""
    torch._dynamo.reset()
    counters.clear()
    parts.clear()
    settings = {"cpu": True, "mixed_precision": precision, "gradient_accumulation_steps": 2, "dynamo_backend": backend}
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=1)], **settings)
    torch.manual_seed(0)
    model = Wide()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model, DistributedDataParallel)
    assert is_compiled_module(model) is (backend != "no")
    x = torch.randn(4, 600) * (1 + accelerator.process_index)
    train = partial(epoch, accelerator, model, optimizer)
    train([x] * 2)
    with torch.compiler.set_stance("fail_on_recompile"):
        train([x] * 4)
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1) as local_sgd:
            for _ in range(2):
                train([x] * 2)
                local_sgd.step()
        train([x] * 2)
    assert not has_compiled_regions(accelerator.unwrap_model(model, keep_torch_compile=False))
    state = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    assert list(state) == list(Wide().state_dict())
    accelerator.free_memory()
    AcceleratorState._reset_state()
    return state


parts = []


def counted(graph, _):
    parts.append(graph)
    return graph.forward


@on_ranks(2, timeout_s=90)
def test_on_ranks_the_same_is_trained_and_no_switch_or_round_compiles_again():
    torch._dynamo.register_backend(counted, name="ofi")  # a word that Accelerate has and torch no longer knows
    for precision in ("no", "bf16"):
        plain, compiled = (trained_on_ranks(backend, precision) for backend in ("no", "ofi"))
        assert (num_graphs(), len(counters["graph_break"])) == (2, 0)  # training and evaluation
        assert len(parts) == 2 * 3  # the buckets of DDP, so that gradients travel during the backward pass
        assert all(torch.equal(plain[name], compiled[name]) for name in plain)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="torch's inductor writes vector code all the same"
)
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
def test_inductor_trains_as_eager_does():
    def trained(backend):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, dynamo_backend=backend)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            loss = model(torch.ones(2, 4)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    assert trained("inductor") == pytest.approx(trained("no"), abs=1e-6)
