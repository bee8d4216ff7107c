# SPDX-License-Identifier: Apache-2.0
"""Groups made of the ranks of a process group, beside those that the script makes itself."""

import torch
import torch.distributed as dist

from farflung.comm.torch_group import TorchGroup
from farflung.testing.ranks import run_ranks


def makes_groups_after_the_script():
    own = dist.new_group([0])  # all ranks call it, as torch asks, and one of them is in it
    everyone = TorchGroup()
    made = [everyone.duplicate(), everyone.split(2), everyone.split(2).duplicate()]
    sums = []
    for group in made:
        total = torch.tensor([float(dist.get_rank())])
        group.all_reduce(total).wait()
        sums.append(total.item())
    return sums, own is not dist.GroupMember.NON_GROUP_MEMBER


def test_a_scripts_own_group_of_some_ranks_keeps_nobody_waiting():
    first, second, third, last = run_ranks(makes_groups_after_the_script, 4, timeout_s=20)
    assert [has_own for _, has_own in (first, second, third, last)] == [True, False, False, False]
    assert first[0] == second[0] == [6, 1, 1]
    assert third[0] == last[0] == [6, 5, 5]
