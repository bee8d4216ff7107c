# SPDX-License-Identifier: Apache-2.0
"""Outer loops of an Accelerator whose ranks form islands: by FSDP, or by DDP with `island_size`."""

import time

import pytest
import torch

from farflung import Accelerator
from farflung.base.causes import Cause
from farflung.base.errors import ConfigError, RankFailure
from farflung.comm.shards import full
from farflung.config.parallelism import ParallelismConfig
from farflung.config.sharding import FullyShardedDataParallelPlugin
from farflung.local_sgd import LocalSGD
from farflung.outer import diloco
from farflung.process.mesh import replicas_here
from farflung.process.world import joined_world
from farflung.state import AcceleratorState, PartialState
from farflung.testing.ranks import run_ranks
from tests.accelerator.conftest import on_ranks
from tests.faults import lives_until
from tests.outer.islands import Uneven
from tests.outer.replicas import same
from tests.recipes import made

LAYOUTS = {
    "FSDP": {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
    "DDP": {"island_size": 2},
}


RECIPES = {
    "diloco": made("diloco", every=3),
    "post_local_sgd": made("post_local_sgd"),
    "streaming": made("streaming_diloco", delay=2, codec="int8"),
}


def trained(accelerator, replica, name, load=None, save=None):
    """Train with data of this replica, the same on all of its ranks; return the whole parameters.

    Args:
        load: a checkpoint to go on from, after five steps.
        save: where to write that one.
    """
    model = Uneven()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    averaging = LocalSGD(accelerator, model, 3) if name == "LocalSGD" else accelerator.outer(model, RECIPES[name])
    with averaging as outer:
        if load is not None:
            accelerator.load_state(load)
        for step in range(5 if load is not None else 0, 8):
            if step == 5 and save is not None:
                accelerator.save_state(save)
            generator = torch.Generator().manual_seed(1000 * step + replica)
            inputs, targets = torch.randn(4, 16, generator=generator), torch.randn(4, 6, generator=generator)
            accelerator.backward((model(inputs) - targets).square().mean())
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if name == "LocalSGD":
                outer.step()
    return {key: full(value).clone() for key, value in accelerator.unwrap_model(model).named_parameters()}


NAMES = ("diloco", "LocalSGD", "post_local_sgd")


def in_replicas():
    return {name: trained(Accelerator(), PartialState().process_index, name) for name in NAMES}


def in_islands(folder):
    outcomes, island = {}, PartialState().process_index // 2
    for layout, options in LAYOUTS.items():
        for name in NAMES:
            outcomes[layout, name] = trained(Accelerator(**options), island, name)
        saved = trained(Accelerator(**options), island, "streaming", save=folder / layout)
        loaded = trained(Accelerator(**options), island, "streaming", load=folder / layout)
        outcomes[layout, "resumed"] = saved, loaded
        AcceleratorState._reset_state()
    return outcomes


@pytest.fixture(scope="module")
def islands(tmp_path_factory):
    return run_ranks(in_islands, 4, tmp_path_factory.mktemp("islands"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_islands_resume_from_a_checkpoint_in_the_middle_of_a_round_with_the_same_bits(islands, layout):
    assert same(*(values for outcomes in islands for values in outcomes[layout, "resumed"]))


@pytest.mark.law("islands-are-replicas")
def test_islands_of_fsdp_and_of_ddp_train_as_replicas_do_bit_by_bit(islands):
    replicas = run_ranks(in_replicas, 2)
    for layout in LAYOUTS:
        for name in NAMES:
            ranks = [outcomes[layout, name] for outcomes in islands]
            if (layout, name) == ("DDP", "post_local_sgd"):  # whose warm-up sums four gradients in another order
                assert all(torch.allclose(value, replicas[0][name][key], atol=1e-5) for key, value in ranks[0].items())
                ranks.append(ranks[0])
            else:
                ranks.append(replicas[0][name])
            assert same(*ranks), (layout, name)


@on_ranks(2)
def test_an_outer_loop_where_all_ranks_share_one_model_is_refused():
    for make in (
        lambda: Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), outer="diloco"),
        lambda: trained(Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()), 0, "diloco"),
        lambda: trained(Accelerator(island_size=2), 0, "LocalSGD"),
    ):
        with pytest.raises(ConfigError, match=r"(?s)(?=.*dp_replicate_size=2).*all 2 processes share one"):
            make()
        AcceleratorState._reset_state()


def left_for_good(told):
    """Rank 3 fails in its island and lives on; return what the others are told."""
    accelerator = Accelerator(**LAYOUTS["FSDP"])
    model = Uneven()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model, optimizer = accelerator.prepare(model, optimizer)
    try:
        with accelerator.outer(model, diloco(2)):
            for step in range(4):
                if step == 3 and accelerator.process_index == 3:
                    joined_world().group.leave("ValueError: bad sample", for_good=True)  # as an uncaught error
                    lives_until(lambda: len(list(told.iterdir())) == 3)
                    raise ValueError("bad sample")
                began = time.monotonic()
                accelerator.backward(model(torch.ones(4, 16)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    except RankFailure as error:
        joined_world().group.leave("a rank was lost", for_good=True, cause=Cause.PEER)
        (told / str(accelerator.process_index)).touch()
        return str(error), time.monotonic() - began
    except ValueError:
        return "left", 0.0


def test_a_rank_that_fails_ends_the_waits_of_its_island_and_of_all_others(tmp_path):
    *others, (last, _) = run_ranks(left_for_good, 4, tmp_path)
    assert last == "left"
    for message, seconds in others:
        assert "rank 3 left (ValueError: bad sample)" in message
        assert seconds < 4


@pytest.mark.parametrize(("local_size", "island_size", "replicas"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (4, 8, 1)])
def test_the_level_of_a_machine_counts_the_islands_on_it(local_size, island_size, replicas):
    assert replicas_here(local_size, island_size) == replicas
