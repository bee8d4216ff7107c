# SPDX-License-Identifier: Apache-2.0
"""The public names. A name that comes or goes is a decision, and a line in the changelog."""

import farflung
import farflung.outer
import farflung.utils

FARFLUNG = """
Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs
DistributedType GradScalerKwargs InitProcessGroupKwargs LocalSGD OuterConfig PartialState ProfileKwargs WatchdogKwargs
__version__ cpu_offload cpu_offload_with_hook debug_launcher disk_offload dispatch_model infer_auto_device_map
init_empty_weights init_on_device install_as_accelerate load_checkpoint_and_dispatch load_checkpoint_in_model
notebook_launcher skip_first_batches synchronize_rng_states
"""
OUTER = """
AverageState Blend ByTime ByWork Cast ClippedToMedian E3M0 ErrorFeedback Every Fp8 GatherMean Gossip Identity Int4
Int8 KeepState Levels Mean MergedState OuterLoop Quadratic Recipe ReduceScatterMean Replace ResetState Round Stats
Streaming TopK TrimmedMean Warmup WithoutOutliers apart blocks by_bytes diloco eager_diloco edit gossip hierarchical
local_sgd merge_states noloco post_local_sgd quadratic slowmo sparse_loco streaming_diloco strided whole
"""
UTILS = """
AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DistributedDataParallelKwargs DistributedType
DynamoBackend GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType
PrecisionType ProfileKwargs ProjectConfiguration RNGType TorchDynamoPlugin WatchdogKwargs broadcast
broadcast_object_list compare_versions compile_regions concatenate convert_to_fp32 extract_model_from_parallel
find_batch_size find_device gather gather_object has_compiled_regions honor_type is_bf16_available is_compiled_module
is_fp16_available is_namedtuple is_peft_model is_torch_tensor is_torch_version listify pad_across_processes
recursively_apply reduce release_memory send_to_device set_seed slice_tensors synchronize_rng_state
synchronize_rng_states tqdm wait_for_everyone write_basic_config
"""


def test_the_public_names_are_these_and_all_of_them_exist():
    for module, names in ((farflung, FARFLUNG), (farflung.outer, OUTER), (farflung.utils, UTILS)):
        assert sorted(module.__all__) == sorted(names.split()), module.__name__
        assert all(hasattr(module, name) for name in module.__all__)
