# SPDX-License-Identifier: Apache-2.0
"""Groups made of the ranks of a process group, beside those that the script makes itself."""

import pickle

import pytest
import torch
import torch.distributed as dist

from farflung.base.errors import RankFailure, StateError
from farflung.comm.torch_group import TorchGroup
from tests.accelerator.conftest import on_ranks
from tests.waits import until


@pytest.mark.parametrize("by_all", [True, False], ids=["called by all", "called by its members"])
@on_ranks(4, timeout_s=20)
def test_a_scripts_own_group_of_some_ranks_keeps_nobody_waiting(by_all):
    rank = dist.get_rank()
    if by_all or rank == 0:
        own = dist.new_group([0], use_local_synchronization=not by_all)
        assert (own is dist.GroupMember.NON_GROUP_MEMBER) is (rank > 0)
    everyone = TorchGroup()
    made = [everyone.duplicate(), everyone.split(2), everyone.split(2).duplicate()]
    for group, expected in zip(made, [6, 1, 1] if rank < 2 else [6, 5, 5], strict=True):
        total = torch.tensor([float(rank)])
        group.all_reduce(total).wait()
        assert total.item() == expected


@on_ranks(5)
def test_who_leaves_a_group_and_a_block_of_it_has_left_once():
    everyone = TorchGroup()
    some = dist.new_group([0, 1, 2, 3])
    if dist.get_rank() < 4:
        group = everyone.within(some)
        block = group.split(2)
        group.leave("the loop has ended")
        if dist.get_rank():
            block.leave("the loop has ended")
        dist.barrier(some)
        assert everyone.presence.describe_left() == ""
        with pytest.raises(pickle.PicklingError, match=r"of some of the ranks .* Pickle what uses all ranks\."):
            pickle.dumps(group)
        dist.destroy_process_group(some)
        del some
        with pytest.raises(StateError, match=r"^The process group of these ranks has been destroyed\."):
            group.barrier()


@on_ranks(2)
def test_a_barrier_of_ranks_that_a_stream_might_wait_for_ends_on_the_host_too():
    """As with NCCL, which waits on the device; so the host asks until all have come, or one has left."""
    group = TorchGroup()
    group.supported = {"cpu", "cuda"}
    group.barrier()
    if group.rank:
        group.leave("why not")
        until(lambda: group.presence.published("ended"))
    else:
        with pytest.raises(RankFailure, match=r"rank 1 left \(why not\)"):
            group.barrier()
        group.presence.publish("ended", "1")


@on_ranks(2)
def test_a_group_that_was_given_back_is_used_again_and_the_keys_of_a_closed_one_are_deleted_once():
    everyone, closed = TorchGroup(), []
    group = everyone.duplicate()
    group.free()
    assert everyone.duplicate() is group
    name = group.pg.group_name
    group.free(reusable=False)
    assert group.is_destroyed
    assert name not in everyone.waits.entered
    forget = everyone.presence.forget

    def noted(names):
        closed.append([*names])
        forget(names)

    everyone.presence.forget = noted
    for _ in range(2):
        everyone.duplicate()
    assert closed == [[name], []]
