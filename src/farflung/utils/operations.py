# SPDX-License-Identifier: Apache-2.0
"""Door: operations over nested data and over processes."""

from farflung.accelerator.helpers import GatheredParameters, copy_tensor_to_devices
from farflung.accelerator.operations import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from farflung.base.absent import (
    chained_operation,
    gather_tensor_shape,
    is_torch_xpu_tensor,
    pad_input_tensors,
    verify_operation,
)
from farflung.base.errors import CollectiveMismatch as DistributedOperationException
from farflung.base.forms import (
    CannotPadNestedTensorWarning,
    TensorInformation,
    find_batch_size,
    get_data_structure,
    get_shape,
    ignorant_find_batch_size,
    initialize_tensors,
    is_tensor_information,
)
from farflung.base.tree import (
    concatenate,
    convert_to_fp32,
    find_device,
    honor_type,
    is_namedtuple,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from farflung.precision.outputs import ConvertOutputsToFp32, convert_outputs_to_fp32

__all__ = [
    "CannotPadNestedTensorWarning",
    "ConvertOutputsToFp32",
    "DistributedOperationException",
    "GatheredParameters",
    "TensorInformation",
    "broadcast",
    "broadcast_object_list",
    "chained_operation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_xpu_tensor",
    "listify",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "verify_operation",
]
