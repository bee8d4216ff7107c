# SPDX-License-Identifier: Apache-2.0
"""What Farflung takes from inside torch: it is there, and it is taken in one file alone."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from farflung.base import torch_internals as internals
from farflung.base.errors import Unsupported
from tests.accelerator.conftest import on_ranks

SOURCE = Path(internals.__file__).parent.parent


# ---- each name is there and does what it is taken for


def test_a_name_that_this_torch_lacks_is_named_with_what_it_is_for():
    with pytest.raises(Unsupported, match=r"has no Linear\._gone, which Farflung uses to copy a module\. Install "):
        internals.taken(nn.Linear(1, 1), "_gone", "copy a module")


def test_many_tensors_are_computed_in_one_call():
    ones, twos = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 2.0)]
    assert [x.sum() for x in internals.foreach_add(ones, twos)] == [6, 9]
    assert [x.sum() for x in internals.foreach_maximum(ones, twos)] == [4, 6]
    assert [x.sum() for x in internals.foreach_lerp(ones, twos, 0.5)] == [3, 4.5]
    internals.foreach_copy_(ones, twos)
    internals.foreach_mul_(ones, 3.0)
    internals.foreach_div_(ones, 4.0)
    assert [x.sum() for x in ones] == [3, 4.5]


def test_a_modules_own_dictionaries_are_live():
    norm = nn.BatchNorm1d(2)
    norm.register_buffer("passing", torch.zeros(1), persistent=False)
    assert internals.own_parameters(norm)["weight"] is norm.weight
    norm.weight = nn.Parameter(torch.zeros(2))
    assert internals.own_parameters(norm)["weight"] is norm.weight
    assert internals.own_buffers(norm)["running_mean"] is norm.running_mean
    assert internals.passing_buffers(norm) == {"passing"}


def test_a_scaler_tells_of_overflows_and_of_what_it_knows_between_two_updates():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for _ in range(2):  # as for each of two optimizers
        internals.ready_scaler(scaler, torch.device("cpu"))
    for gradient in (1.0, float("inf")):
        weight.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        assert internals.overflowed(scaler, optimizer) is (gradient != 1.0)
        assert internals.scaler_stages(scaler)[id(optimizer)]["stage"].name == "STEPPED"
        scaler.update()


def test_a_sequence_of_schedules_tells_its_parts():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    parts = [ConstantLR(optimizer), LinearLR(optimizer)]
    assert internals.sequence_of(SequentialLR(optimizer, parts, milestones=[3])) == (parts, [3])


def test_hooks_that_change_what_is_loaded_are_seen():
    layer = nn.Linear(1, 1)
    assert not internals.changes_what_it_loads(layer)
    layer.register_load_state_dict_pre_hook(lambda *_: None)
    assert internals.changes_what_it_loads(layer)


def test_persistent_workers_are_not_taken_along_by_a_copy_of_a_loader():
    loader = DataLoader(range(2), num_workers=1, persistent_workers=True)
    list(loader)
    assert internals.has_live_workers(loader)
    assert not internals.has_live_workers(internals.copied_loader(loader, {}))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_a_stream_says_when_it_has_no_more():
    batches = iter(DataLoader(Stream()))
    assert not internals.is_exhausted(batches)
    assert len(list(batches)) == 4
    assert internals.is_exhausted(batches)
    assert not internals.is_exhausted(iter([]))


@on_ranks(2)
def test_a_group_counts_its_collectives_and_has_a_store_and_a_rank_counts_its_groups():
    before = internals.num_collectives(dist.group.WORLD)
    dist.barrier()
    internals.default_store().set(f"rank {dist.get_rank()}", "here")
    dist.barrier()
    assert internals.num_collectives(dist.group.WORLD) - before == 2
    assert internals.default_store().get("rank 0") == b"here"
    assert internals.num_groups() == 1
    dist.new_group([0])
    assert internals.num_groups() == (1 if dist.get_rank() else 2)


@on_ranks(2)
def test_ranks_that_were_in_different_groups_meet_once_their_next_has_the_same_number():
    dist.new_group([0])
    before = internals.group_serial()
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
        assert internals.group_serial() > before
    internals.raise_group_serial(5)
    internals.raise_group_serial(4)
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    assert (total.item(), internals.group_serial()) == (2, 6)


# ---- nothing else in the package uses a private name of torch's


def private_names():
    """The names that begin with an underscore in torch, and in what the package uses of it."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    things = [
        *(torch, torch.amp.GradScaler("cpu"), torch.nn.parallel.DistributedDataParallel),
        *(dist, dist.distributed_c10d, dist.ProcessGroup, dist.Store, dist.Work),
        *(
            nn.BatchNorm1d(1),
            torch.compile(nn.Linear(1, 1), backend="eager"),
            weight,
            torch.UntypedStorage,
            torch.Generator(),
        ),
        *(DataLoader([1]), iter(DataLoader([1])), BatchSampler([1], 1, False), RandomSampler([1], num_samples=1)),
        *(optimizer, OneCycleLR(optimizer, 1.0, 3), SequentialLR(optimizer, [LinearLR(optimizer)], [])),
    ]
    return {name for thing in things for name in dir(thing) if name[0] == "_" and name[:2] != "__"}


def uses_of(tree, names):
    """The lines that use one of `names` on anything but `self`, and what is imported from a private module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and node.value in names:
            yield node.lineno, node.value
        elif isinstance(node, ast.keyword) and node.arg in names:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from ((node.lineno, part) for part in parts if part[0] == "_")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch.") and "._" in alias.name:
                    yield node.lineno, alias.name


OURS = {"_drop_last", "_reset_state", "_world", "_T"}  # attributes of our own classes, too, and a type variable


@pytest.fixture(scope="module")
def private():
    return private_names() - OURS


def test_private_names_of_torch_are_used_in_one_file(private):
    used = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path != Path(internals.__file__)
        for line, name in uses_of(ast.parse(path.read_text()), private)
    ]
    assert not used, "give these a function in base/torch_internals.py:\n" + "\n".join(used)


@pytest.mark.parametrize(
    "source",
    [
        "torch._foreach_add(a, b)",
        "import torch._dynamo as dynamo",
        "from torch._C import x",
        "from torch.utils.data import _utils",
        "module._parameters",
        "getattr(loader, '_iterator')",
        "new.__dict__.update(_modules={})",
        "dist.distributed_c10d._get_default_store()",
        "pg._get_sequence_number_for_group()",
        "scaler._per_optimizer_states",
        "scheduler._step_count",
    ],
)
def test_each_way_to_a_private_name_is_found(source, private):
    assert list(uses_of(ast.parse(source), private))
