# SPDX-License-Identifier: Apache-2.0
"""The public names. A name that comes or goes is a decision, and a line in the changelog.

Those of the other doors, such as `farflung.utils`, are compared with Accelerate's in tests/compat.
"""

import sys

import farflung
import farflung.outer
from tests.python import run_python

FARFLUNG = """
Accelerator AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin
DistributedDataParallelKwargs DistributedType FullyShardedDataParallelPlugin GradScalerKwargs InitProcessGroupKwargs
LocalSGD OuterConfig ParallelismConfig PartialState ProfileKwargs WatchdogKwargs __version__ cpu_offload
cpu_offload_with_hook debug_launcher disk_offload dispatch_model find_executable_batch_size infer_auto_device_map
init_empty_weights init_on_device install_as_accelerate is_rich_available load_checkpoint_and_dispatch
load_checkpoint_in_model notebook_launcher prepare_pippy skip_first_batches synchronize_rng_states
"""
OUTER = """
AverageState Blend ByTime ByWork Cast Change ClippedToMedian E3M0 ErrorFeedback Every Fp8 GatherMean Gossip Identity
Int4 Int8 KeepState Levels Mean MergedState OuterLoop Quadratic RadialMean Recipe ReduceScatterMean Replace ResetState
Round Screened Stats Streaming TopK TrimmedMean Warmup WithoutOutliers apart blocks by_bytes diloco eager_diloco edit
gossip hierarchical local_sgd merge_states muon_groups noloco post_local_sgd quadratic robust slowmo sparse_loco
streaming_diloco strided whole
"""


def test_the_public_names_are_these_and_all_of_them_exist():
    for module, names in ((farflung, FARFLUNG), (farflung.outer, OUTER)):
        odd = set(module.__all__) ^ set(names.split())
        assert not odd, f"{module.__name__}: {odd} must be public there and in the list of this file, or in neither"
        assert all(hasattr(module, name) for name in module.__all__)


MODULES = """
accelerator big_modeling checkpointing commands data_loader hooks inference launchers logging optimizer
parallelism_config scheduler state tracking utils outer
"""


def test_modules_are_attributes_and_loaded_at_first_use(monkeypatch):
    run_python("-c", "import sys, farflung; assert not hasattr(farflung, 'nowhere') and 'torch' not in sys.modules")
    for name in MODULES.split():
        monkeypatch.delitem(vars(farflung), name, raising=False)  # as before its first use
        assert getattr(farflung, name) is sys.modules[f"farflung.{name}"], name
    assert farflung.logging.get_logger("here").name == "here"
