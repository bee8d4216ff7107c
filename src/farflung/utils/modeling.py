# SPDX-License-Identifier: Apache-2.0
"""Door: sizes, device maps and tensors of models that are larger than a device."""

from farflung.big_model.device_map import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    check_device_map as check_device_map,
    clean_device_map as clean_device_map,
    compute_module_sizes as compute_module_sizes,
    compute_module_total_buffer_size as compute_module_total_buffer_size,
    dtype_byte_size as dtype_byte_size,
    get_balanced_memory as get_balanced_memory,
    get_max_layer_size as get_max_layer_size,
    get_max_memory as get_max_memory,
    get_module_leaves as get_module_leaves,
    get_module_size_with_ties as get_module_size_with_ties,
    infer_auto_device_map as infer_auto_device_map,
)
from farflung.big_model.hooks import (
    align_module_device as align_module_device,
    has_offloaded_params as has_offloaded_params,
)
from farflung.big_model.load import (
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_offloaded_weights as load_offloaded_weights,
    load_state_dict as load_state_dict,
)
from farflung.big_model.tensors import (
    check_device_same as check_device_same,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    find_tied_parameters as find_tied_parameters,
    get_non_persistent_buffers as get_non_persistent_buffers,
    id_tensor_storage as id_tensor_storage,
    named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from farflung.compat.absent import __getattr__ as __getattr__
from farflung.compat.free_functions import *
