# SPDX-License-Identifier: Apache-2.0
"""Door: where scripts look for loaders, samplers and their shards."""

from farflung.data.dispatcher import DataLoaderDispatcher
from farflung.data.iterable import IterableDatasetShard
from farflung.data.loader import DataLoaderShard, SkipDataLoader
from farflung.data.prepare import prepare_data_loader, skip_first_batches
from farflung.data.samplers import BatchSamplerShard, SeedableRandomSampler, SkipBatchSampler

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
