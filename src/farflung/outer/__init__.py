# SPDX-License-Identifier: Apache-2.0
"""The outer loop: replicas that train independently and synchronize every H steps."""

import torch.distributed.nn.functional  # noqa: F401  before there is a group, which its default arguments would keep

import farflung.methods.recipes as recipes
from farflung.codec.base import Cast, Identity
from farflung.codec.blockwise import E3M0, Fp8, Int4, Int8
from farflung.codec.feedback import ErrorFeedback
from farflung.codec.sparse import TopK
from farflung.exchanged.states import MergedState, merge_states
from farflung.methods.aggregate import GatherMean, Gossip, RadialMean, ReduceScatterMean, TrimmedMean
from farflung.methods.agreement import Blend, Mean, Replace
from farflung.methods.fragments import apart, blocks, by_bytes, strided, whole
from farflung.methods.inner import AverageState, KeepState, ResetState, muon_groups
from farflung.methods.policies import ClippedToMedian, Screened, WithoutOutliers
from farflung.methods.recipe import Recipe
from farflung.methods.recipes import *  # noqa: F403 - its __all__ is the list of recipes
from farflung.methods.robustness import robust
from farflung.methods.schedule import ByTime, Change, Every, Levels, Quadratic, Streaming, Warmup
from farflung.methods.weighting import ByWork
from farflung.outer.engine import OuterLoop
from farflung.outer.stats import Round, Stats

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
