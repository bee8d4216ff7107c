# SPDX-License-Identifier: Apache-2.0
"""Door: models that are larger than a device."""

from farflung.big_model.attach import attach_layerwise_casting_hooks
from farflung.big_model.device_map import check_device_map, infer_auto_device_map
from farflung.big_model.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from farflung.big_model.load import load_checkpoint_in_model
from farflung.big_model.sizes import get_balanced_memory
from farflung.big_model.tensors import init_empty_weights, init_on_device
from farflung.launch.private_names import _refuse_recurrent_layers_under_sequence_parallelism

__all__ = [
    "_refuse_recurrent_layers_under_sequence_parallelism",
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "get_balanced_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
