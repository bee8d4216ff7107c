# SPDX-License-Identifier: Apache-2.0
"""Groups made of the ranks of a process group, beside those that the script makes itself."""

import pytest
import torch
import torch.distributed as dist

from farflung.comm.torch_group import TorchGroup
from farflung.testing.ranks import run_ranks


def makes_groups_after_the_script(by_all):
    if by_all or dist.get_rank() == 0:  # one of them is in it
        own = dist.new_group([0], use_local_synchronization=not by_all)
    else:
        own = dist.GroupMember.NON_GROUP_MEMBER
    everyone = TorchGroup()
    made = [everyone.duplicate(), everyone.split(2), everyone.split(2).duplicate()]
    sums = []
    for group in made:
        total = torch.tensor([float(dist.get_rank())])
        group.all_reduce(total).wait()
        sums.append(total.item())
    return sums, own is not dist.GroupMember.NON_GROUP_MEMBER


@pytest.mark.parametrize("by_all", [True, False], ids=["called by all", "called by its members"])
def test_a_scripts_own_group_of_some_ranks_keeps_nobody_waiting(by_all):
    first, second, third, last = run_ranks(makes_groups_after_the_script, 4, by_all, timeout_s=20)
    assert [has_own for _, has_own in (first, second, third, last)] == [True, False, False, False]
    assert first[0] == second[0] == [6, 1, 1]
    assert third[0] == last[0] == [6, 5, 5]


def leaves_with_or_without_a_block():
    everyone = TorchGroup()
    some = dist.new_group([0, 1, 2, 3])
    if dist.get_rank() < 4:
        group = everyone.within(some)
        block = group.split(2)
        group.leave("the loop has ended")
        if dist.get_rank():
            block.leave("the loop has ended")
        dist.barrier(some)
        return everyone.presence.describe_left()
    return ""


def test_who_leaves_a_group_and_a_block_of_it_has_left_once():
    assert run_ranks(leaves_with_or_without_a_block, 5) == [""] * 5
