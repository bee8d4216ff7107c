# SPDX-License-Identifier: Apache-2.0
"""The outer loop: replicas that train independently and synchronize every H steps."""

import torch.distributed.nn.functional  # noqa: F401  before there is a group, which its default arguments would keep

import farflung.outer.recipes as recipes
from farflung.codec.base import Cast, Identity
from farflung.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.codec.feedback import ErrorFeedback
from farflung.codec.sparse import TopK
from farflung.outer.aggregate import GatherMean, Gossip, RadialMean, ReduceScatterMean, TrimmedMean
from farflung.outer.agreement import Blend, Mean, Replace
from farflung.outer.engine import OuterLoop
from farflung.outer.fragments import apart, blocks, by_bytes, strided, whole
from farflung.outer.inner import AverageState, KeepState, ResetState, muon_groups
from farflung.outer.merge_states import MergedState, merge_states
from farflung.outer.recipe import Recipe
from farflung.outer.recipes import *  # noqa: F403 - its __all__ is the list of recipes
from farflung.outer.robustness import robust
from farflung.outer.schedule import ByTime, Change, Every, Levels, Quadratic, Streaming, Warmup
from farflung.outer.stats import Round, Stats
from farflung.outer.weighting import ByWork, ClippedToMedian, Screened, WithoutOutliers

__all__ = [
    "E3M0",
    "AverageState",
    "Blend",
    "ByTime",
    "ByWork",
    "Cast",
    "Change",
    "ClippedToMedian",
    "ErrorFeedback",
    "Every",
    "Fp8",
    "GatherMean",
    "Gossip",
    "Identity",
    "Int4",
    "Int8",
    "KeepState",
    "Levels",
    "Mean",
    "MergedState",
    "OuterLoop",
    "Quadratic",
    "RadialMean",
    "Recipe",
    "ReduceScatterMean",
    "Replace",
    "ResetState",
    "Round",
    "Screened",
    "Stats",
    "Streaming",
    "TopK",
    "TrimmedMean",
    "Warmup",
    "WithoutOutliers",
    "apart",
    "blocks",
    "by_bytes",
    "merge_states",
    "muon_groups",
    "robust",
    "strided",
    "whole",
]
__all__ += recipes.__all__
