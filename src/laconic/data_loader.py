# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for loaders, samplers and their shards."""

from laconic.data.dispatcher import DataLoaderDispatcher
from laconic.data.iterable import IterableDatasetShard
from laconic.data.loader import DataLoaderShard, SkipDataLoader
from laconic.data.prepare import prepare_data_loader, skip_first_batches
from laconic.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "prepare_data_loader",
    "skip_first_batches",
]
