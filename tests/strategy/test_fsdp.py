# SPDX-License-Identifier: Apache-2.0
"""FSDP and HSDP on real gloo ranks: the same training as under DDP, and as on one process."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from farflung import Accelerator
from farflung.base.errors import Unsupported
from farflung.comm.group import SoloGroup
from farflung.comm.shards import full, is_sharded
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.outer import OuterLoop, diloco
from farflung.state import AcceleratorState
from farflung.testing.ranks import run_ranks
from farflung.utils import DistributedType, TorchDynamoPlugin
from tests.accelerator.conftest import on_ranks

STEPS, WINDOW, BATCH = 20, 2, 4


class Block(nn.Module):
    """A layer whose sizes no number of ranks divides."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.mix(self.norm(x)))


class Tied(nn.Module):
    """Tokens to tokens: the last layer is the embedding, the first block is frozen, one vector has 3 values."""

    def __init__(self, tokens=11, width=7):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[0].requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.scale)
        return logits + F.pad(self.shift, (0, logits.shape[-1] - 3))


def made(seed=0):
    torch.manual_seed(seed)
    model = Tied()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def batches(rank, size):
    """The micro-batches of a rank: its part of those that one process would have."""
    torch.manual_seed(7)
    for tokens in torch.randint(11, (STEPS * WINDOW, BATCH * 4, 5)):
        yield tokens.view(size, -1, 5)[rank]


def train(accelerator, model, optimizer, rank, size):
    losses = []
    for tokens in batches(rank, size):
        trained = list(map(id, model.parameters()))
        with torch.no_grad():
            model(tokens)
        assert list(map(id, model.parameters())) == trained  # the optimizer's, not what was gathered from them
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = {name: full(value.detach()).clone() for name, value in model.state_dict().items()}
    return losses, norm.item(), {name.removeprefix("module."): value for name, value in weights.items()}


BY_BLOCK = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_offload": True, "cpu_offload": True}
LAYOUTS = {
    "ddp": {},
    "fsdp": {"fsdp_plugin": BY_BLOCK},
    "whole": {"fsdp_plugin": {"reshard_after_forward": False}},
    "hsdp": {
        "fsdp_plugin": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 60},
        "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2},
    },
    "recomputed": {"fsdp_plugin": {**BY_BLOCK, **RECOMPUTED}},
    "compiled": {"fsdp_plugin": BY_BLOCK, "dynamo_backend": "aot_eager"},
}
KINDS = {"fsdp_plugin": FullyShardedDataParallelPlugin, "parallelism_config": ParallelismConfig}


def in_all_layouts():
    found = {}
    for layout, settings in LAYOUTS.items():
        AcceleratorState._reset_state()
        chosen = {name: made(**settings[name]) for name, made in KINDS.items() if name in settings}
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW, **settings | chosen)
        rank, size = accelerator.process_index, accelerator.num_processes
        model, optimizer = made(seed=rank)  # prepare gives all ranks those of the first one
        model, optimizer = accelerator.prepare(model, optimizer)
        assert (accelerator.distributed_type == DistributedType.FSDP) == (layout != "ddp")
        assert any(map(is_sharded, model.parameters())) == (layout != "ddp")
        found[layout] = train(accelerator, model, optimizer, rank, size)
    return found


@pytest.mark.long
@pytest.mark.timeout(240)
def test_sharded_training_is_that_of_ddp_and_of_one_process():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    alone = train(accelerator, *accelerator.prepare(*made()), 0, 1)
    for found in run_ranks(in_all_layouts, 4):
        for layout, (losses, norm, weights) in found.items():
            assert losses == pytest.approx(alone[0], abs=1e-5), layout
            assert norm == pytest.approx(alone[1], rel=1e-5), layout
            assert weights.keys() == alone[2].keys(), layout
            for name, value in alone[2].items():
                torch.testing.assert_close(weights[name], value, atol=1e-5, rtol=0, msg=f"{layout}: {name}")


def test_on_one_process_activations_are_recomputed_and_nothing_is_sharded():
    kept, results = [], []
    for recomputed in (False, True):
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = FullyShardedDataParallelPlugin(**BY_BLOCK, activation_checkpointing=recomputed)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(*made())
        assert not any(map(is_sharded, model.parameters()))
        kept.append(0)

        def keep(x):
            kept[-1] += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            model(torch.zeros(4, 5, dtype=torch.long))
        results.append(train(accelerator, model, optimizer, 0, 1)[0])
    assert results[0] == results[1]
    assert kept[1] < kept[0] / 2


def recomputing(**settings):
    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True, **settings)
    return Accelerator(cpu=True, fsdp_plugin=plugin)


def prepare_twice():
    for policy in (BY_BLOCK, {}):
        model = recomputing(**policy).prepare(made()[0])
        before = [module.forward for module in model.modules()]
        accelerator = recomputing(**policy)
        model, calls = accelerator.prepare(model), []
        assert [module.forward for module in model.modules()] == before
        model.blocks[1].mix.register_forward_hook(lambda *_, calls=calls: calls.append(0))
        accelerator.backward(model(torch.zeros(4, 5, dtype=torch.long)).sum())
        assert len(calls) == 2


def test_a_second_prepare_leaves_recomputation_as_it_is():
    prepare_twice()


@on_ranks(2)
def test_a_second_prepare_leaves_the_recomputation_of_a_sharded_model_as_it_is():
    prepare_twice()
    AcceleratorState._reset_state()
    sharded = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()).prepare(Stack(4))
    with pytest.raises(Unsupported, match=r"Stack came sharded, .* before fully_shard"):
        recomputing().prepare(sharded)


class Stack(nn.Module):
    """Its constructor has to be given something, as most have."""

    def __init__(self, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        return self.blocks[1](self.blocks[0](x))


@on_ranks(2, timeout_s=120)
def test_a_compiled_sharded_model_is_saved_as_a_plain_one(tmp_path):
    """After a step of a model that is plain, compiled as a whole, by regions or by the script."""
    saved = []
    for way in ("no", "whole", "regions", "torch.compile"):
        backend = "eager" if way in ("whole", "regions") else "no"
        dynamo = TorchDynamoPlugin(backend=backend, use_regional_compilation=way == "regions")
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(), dynamo_plugin=dynamo)
        torch.manual_seed(0)
        model = Stack(4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        called = torch.compile(model, backend="eager") if way == "torch.compile" else model
        accelerator.backward(called(torch.ones(2, 4)).sum())
        optimizer.step()
        state = {name: value.tolist() for name, value in accelerator.get_state_dict(called).items()}
        accelerator.save_model(called, tmp_path / way)
        plain = accelerator.unwrap_model(called, keep_torch_compile=False)
        assert torch.equal(plain(torch.ones(1, 4)), called(torch.ones(1, 4)))
        if accelerator.is_main_process:
            saved.append((state, [path.read_bytes() for path in sorted((tmp_path / way).iterdir())]))
            assert state.keys() == {f"blocks.{k}.{name}" for k in range(2) for name in ("weight", "bias")}
            assert saved[0][1]
            assert saved[-1] == saved[0], way
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        AcceleratorState._reset_state()


def odd(kind):
    """A model that keeps something which can't be exchanged."""
    model = nn.Linear(4, 4)
    if kind == "sparse parameter":
        model.odd = nn.Parameter(torch.eye(4).to_sparse())
    else:
        model.register_buffer("odd", torch.eye(4).to_sparse() if kind == "sparse buffer" else EIGHT_BITS)
    return model


EIGHT_BITS = torch.ones(4).to(torch.float8_e4m3fn)
SPARSE = (
    r"^odd is a sparse tensor \(torch\.sparse_coo\), .* Store it dense .*, or keep it outside of the model's parameters"
)
FLOAT8 = (
    r"^odd is a torch\.float8_e4m3fn tensor, which .* on CPUs, or averaged.* bits as uint8 .* another floating type"
)
ODD = {"sparse parameter": SPARSE, "sparse buffer": SPARSE, "float8 buffer": FLOAT8}


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("kind", ODD)
@on_ranks(2)
def test_what_ranks_cannot_exchange_is_named(kind, sharded):
    plugin = FullyShardedDataParallelPlugin() if sharded else None
    with pytest.raises(Unsupported, match=ODD[kind]):
        Accelerator(cpu=True, fsdp_plugin=plugin).prepare(odd(kind))


@pytest.mark.parametrize("kind", ODD)
def test_what_replicas_cannot_exchange_is_named(kind):
    with pytest.raises(Unsupported, match=ODD[kind]):
        OuterLoop(odd(kind), diloco(every=1), SoloGroup())
