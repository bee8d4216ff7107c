# SPDX-License-Identifier: Apache-2.0
"""Door: operations over nested data and over processes."""

from farflung.accelerator.operations import (
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    gather as gather,
    gather_object as gather_object,
    pad_across_processes as pad_across_processes,
    reduce as reduce,
)
from farflung.base.errors import DistributedOperationException as DistributedOperationException
from farflung.base.tree import (
    convert_to_fp32 as convert_to_fp32,
    find_device as find_device,
    honor_type as honor_type,
    is_namedtuple as is_namedtuple,
    is_torch_tensor as is_torch_tensor,
    listify as listify,
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
)
from farflung.comm.collectives import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.free_functions import *
