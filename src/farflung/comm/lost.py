# SPDX-License-Identifier: Apache-2.0
"""What it means that a connection was lost in a collective of torch's own, which names nobody."""

from __future__ import annotations

from farflung.base.errors import PEER_LOST, FarflungError
from farflung.comm.group import Group
from farflung.comm.torch_group import TorchGroup


def explained(error: BaseException, group: Group) -> BaseException:
    """Return what the ranks of `group` know of the one that was lost, in place of what the transport says; or `error`.

    Args:
        group: as large as possible: the lost rank should be in it.
    """
    if isinstance(error, FarflungError) or not isinstance(error, RuntimeError):
        return error
    if not isinstance(group, TorchGroup) or not any(words in str(error) for words in PEER_LOST):
        return error
    return group.failure(error).with_traceback(error.__traceback__)
