# SPDX-License-Identifier: Apache-2.0
"""The outer loop over islands whose ranks hold parts of a model, and copies of others: by TP, CP, HSDP."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from farflung.base.errors import ConfigError, RankFailure, Unsupported
from farflung.codec.base import Identity
from farflung.codec.blockwise import E3M0, Int8
from farflung.comm.shards import local, num_parts
from farflung.comm.torch_group import TorchGroup
from farflung.members.elastic import Elastic
from farflung.outer import OuterLoop, TopK, diloco, local_sgd, sparse_loco, streaming_diloco
from farflung.testing.ranks import run_ranks
from tests.errors import error_of
from tests.faults import kill
from tests.outer.elastic_run import transport_of_ranks
from tests.outer.parallel import LAYOUTS, MADE, Block, ParallelRun, Rows
from tests.outer.replicas import same
from tests.recipes import RECIPES

# Codecs look at blocks of a rank's values, which are others in each layout.
EXACT = {
    **{name: replace(recipe, codec=Identity()) for name, recipe in RECIPES.items() if not name.endswith("two hops")},
    "sparse_loco": sparse_loco(2, codec=TopK(k=16, chunk=16, bits=32)),  # which sends everything
}


def trained(recipes, layout, made):
    outcomes = {}
    for name, recipe in recipes.items():
        run = ParallelRun(recipe, layout, made).steps(*range(1, 8))
        run.outer.flush()
        outcomes[name] = run.values(), [(one.norms, one.norm) for one in run.rounds], run.outer.stats()
        run.outer.detach()
    return outcomes


def check(layout, recipes, made=None):
    made = made or MADE.get(layout, Block)
    alone = run_ranks(trained, 2, recipes, None, made)[0]
    ranks = run_ranks(trained, 2 * math.prod(LAYOUTS[layout].values()), recipes, layout, made, timeout_s=120)
    for name in recipes:
        values, norms, _ = zip(*(one[name] for one in ranks), strict=True)
        assert same(*values), (layout, name)
        wanted, wanted_norms, _ = alone[name]
        for key, value in values[0].items():
            torch.testing.assert_close(value, wanted[key], rtol=0, atol=1e-9, msg=f"{layout} {name} {key}")
        assert norms[0] == norms[1], (layout, name)  # of one island
        for (replicas, mean), (replicas_alone, mean_alone) in zip(norms[0], wanted_norms, strict=True):
            assert replicas == pytest.approx(replicas_alone, rel=1e-6), (layout, name)
            assert mean == pytest.approx(mean_alone, rel=1e-6), (layout, name)


@pytest.mark.law("islands-are-replicas")
def test_tensor_parallel_islands_train_as_replicas_of_one_rank_do():
    check("tp", {name: EXACT[name] for name in ("local_sgd", "edit")})


@pytest.mark.long
@pytest.mark.law("islands-are-replicas")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_islands_of_parts_and_copies_train_as_replicas_of_one_rank_do_under_every_recipe(layout):
    check(layout, EXACT)


# The same blocks in each layout, as no part of a row of `Rows` is cut within one.
LOSSY = {
    "diloco": diloco(2, codec=Int8(block=8)),
    "sparse_loco": sparse_loco(2, codec=TopK(k=2, chunk=8)),
    "streaming_diloco": streaming_diloco(4, 2, delay=1, codec=E3M0(block=8)),
}


@pytest.mark.law("islands-are-replicas")
@pytest.mark.parametrize("layout", ["tp", pytest.param("fsdp+tp", marks=pytest.mark.long)])
def test_lossy_codecs_and_their_error_feedback_are_those_of_replicas_of_one_rank(layout):
    check(layout, LOSSY, Rows)


def bytes_and_parts(layout):
    run = ParallelRun(local_sgd(2), layout).steps(1, 2, 3, 4)
    stats, trained = run.outer.stats(), [p for p in run.model.parameters() if p.requires_grad]
    run.outer.detach()
    held = 8 * sum(local(p).numel() for p in trained)
    return stats.bytes_sent / stats.rounds, held, list(map(num_parts, trained))


@pytest.mark.law("stated-bytes")
def test_a_round_sends_each_value_of_a_column_once():
    ranks = run_ranks(bytes_and_parts, 4, "tp")
    for sent, held, parts in ranks:
        assert sent == held
        assert sorted(set(parts)) == [1, 2]
    cut = 8 * (10 * 16 + 16 * 10 + 5 * 16)
    assert ranks[0][1] + ranks[1][1] == cut + 2 * 8 * 3 * 16  # the norms, which both have


def with_gradients_that_nobody_sums(recipe):
    run = ParallelRun(recipe, "tp")

    def as_nobody_sums(*_):
        run.model.last.weight.grad.mul_(run.mesh.get_local_rank("tp"))

    run.optimizer.register_step_pre_hook(as_nobody_sums)
    said = error_of(Unsupported, run.steps, *range(1, 7))
    run.outer.detach()
    return said


def of_odd_meshes():
    run = ParallelRun(diloco(2), "tp")
    run.outer.detach()
    return [
        error_of(ConfigError, OuterLoop, run.model, diloco(2), mesh=run.mesh, **options)
        for options in ({"outer": "replicas"}, {"outer": "tp"}, {"outer": "replica", "group": run.outer._quorum.group})
    ]


def refusals():
    late = streaming_diloco(4, 1, delay=1)
    return [*map(with_gradients_that_nobody_sums, (local_sgd(2), late)), *of_odd_meshes()]


def test_gradients_that_nobody_sums_and_odd_meshes_are_named():
    for at_once, late, unknown, within, several in run_ranks(refusals, 4):
        for text in (at_once, late):
            assert text.startswith("last.weight has other values on rank 1 of an island than on its rank 0")
        assert "it has ['replica', 'tp']" in unknown
        assert "OuterLoop(mesh=, outer=)" in within
        assert "leave out group" in several


class Stages:
    """Two linear layers on two ranks, in a pipeline, or both on one; each with its optimizer and outer loop.

    The last values of a buffer that don't fill a vector register are rounded by torch in another way than the others:
    layers of 32 features have none.
    """

    def __init__(self, recipe, sizes, is_island=False):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "stage"))
        self.index, self.stage = mesh.get_local_rank("replica"), mesh.get_local_rank("stage")
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).double()
        self.schedule = None
        if sizes[1] == 2:
            self.model = self.model[self.stage]
            made = PipelineStage(self.model, self.stage, 2, torch.device("cpu"), group=mesh.get_group("stage"))
            self.schedule = ScheduleGPipe(made, 2, loss_fn=nn.functional.mse_loss)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        groups = {"mesh": mesh, "outer": "replica"} if is_island else {"group": TorchGroup(mesh.get_group("replica"))}
        self.outer = OuterLoop(self.model, recipe, **groups)

    def backward(self, inputs, targets):
        """Compute the gradients of a batch of two microbatches."""
        if self.schedule is not None:
            self.schedule.step(*([] if self.stage else [inputs]), **({"target": targets} if self.stage else {}))
            return
        outputs = [self.model(one) for one in inputs.chunk(2)]
        for output, target in zip(outputs, targets.chunk(2), strict=True):
            nn.functional.mse_loss(output, target).backward()
        for parameter in self.model.parameters():
            parameter.grad /= 2

    def steps(self, *numbers):
        for number in numbers:
            data = torch.Generator().manual_seed(1000 * number + self.index)
            self.backward(*torch.randn(2, 4, 32, generator=data, dtype=torch.float64))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.outer.step()
        return self


def in_stages(sizes):
    values = []
    for name in ("local_sgd", "slowmo", "diloco", "eager_diloco"):
        run = Stages(EXACT[name], sizes).steps(*range(1, 8))
        run.outer.flush()
        run.outer.detach()
        values += run.model.parameters()
    return [value.detach() for value in values]


@pytest.mark.law("islands-are-replicas")
def test_stages_with_a_loop_for_each_column_train_bitwise_as_one_rank_that_sums_microbatches_does():
    first, second, *others = run_ranks(in_stages, 4, (2, 2))
    whole = run_ranks(in_stages, 2, (2, 1))[0]
    joined = [value for k in range(0, len(first), 2) for part in (first, second) for value in part[k : k + 2]]
    assert all(map(torch.equal, joined, whole))
    assert all(map(torch.equal, [*first, *second], [value for part in others for value in part]))


def stages_as_an_island():
    return error_of(Unsupported, Stages(local_sgd(2), (2, 2), is_island=True).steps, 1, 2, 3)


def test_stages_of_a_pipeline_are_not_taken_for_copies_of_one():
    for text in run_ranks(stages_as_an_island, 4):
        assert text == (
            "weight has other values on rank 1 of an island than on its rank 0, though neither has a part of it that "
            "the other lacks: nothing sums its gradients over them, or they began with different values. Make it a "
            "DTensor too (by parallelize_module, such as SequenceParallel, or fully_shard of the whole model), average "
            "its gradients over the island (DDP's process_group=), or freeze it. Pipeline stages are no island: give "
            "each stage an OuterLoop of its own, over the ranks of its column as group=."
        )


def lose_an_island(folder):
    """Train in two elastic islands, of which the second is killed after three steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    island, member = TorchGroup(mesh["tp"].get_group()), mesh.get_local_rank("replica")
    membership = Elastic(transport_of_ranks(), member, expected=2, island=island)
    run, rounds = ParallelRun(diloco(2), "tp", mesh=mesh, membership=membership), []
    run.outer.listeners.append(lambda one: rounds.append(len(one.members)))
    run.steps(1, 2, 3)
    if member == 1:
        kill()
    run.steps(*range(4, 9))
    torch.save((rounds, run.values()), folder / str(dist.get_rank()))


@pytest.mark.long
def test_the_survivors_of_an_island_that_is_killed_continue_alone(tmp_path):
    with pytest.raises(RankFailure, match="rank 2"):
        run_ranks(lose_an_island, 4, tmp_path, grace_s=60.0)
    (rounds, values), (others, same_values) = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    assert rounds == others == [2, 1, 1, 1]
    assert same(values, same_values)
