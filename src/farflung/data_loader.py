# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for loaders, samplers and their shards."""

from farflung.accelerator.operations import prepare_data_loader
from farflung.compat.absent import __getattr__ as __getattr__
from farflung.data.dispatcher import DataLoaderDispatcher
from farflung.data.iterable import IterableDatasetShard
from farflung.data.loader import DataLoaderShard, PreparedLoader as DataLoaderStateMixin
from farflung.data.prepare import skip_first_batches
from farflung.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler
from farflung.data.torch_loaders import LoaderView as DataLoaderAdapter, SkipDataLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
