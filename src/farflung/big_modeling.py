# SPDX-License-Identifier: Apache-2.0
"""Door: models that are larger than a device."""

from farflung.big_model.attach import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
from farflung.big_model.device_map import (
    check_device_map as check_device_map,
    get_balanced_memory as get_balanced_memory,
    infer_auto_device_map as infer_auto_device_map,
)
from farflung.big_model.dispatch import (
    cpu_offload as cpu_offload,
    cpu_offload_with_hook as cpu_offload_with_hook,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from farflung.big_model.load import load_checkpoint_in_model as load_checkpoint_in_model
from farflung.big_model.tensors import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from farflung.compat.private_names import (
    _refuse_recurrent_layers_under_sequence_parallelism as _refuse_recurrent_layers_under_sequence_parallelism,
)
