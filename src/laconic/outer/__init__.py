# SPDX-License-Identifier: Apache-2.0
"""The outer loop: replicas that train alone and agree now and then."""

from laconic.outer.aggregate import GatherMean, Gossip, Mean, ReduceScatterMean, TrimmedMean
from laconic.outer.codec.base import Cast, Identity
from laconic.outer.codec.blockwise import E3M0, Fp8, Int4, Int8
from laconic.outer.codec.feedback import ErrorFeedback
from laconic.outer.codec.sparse import TopK
from laconic.outer.engine import OuterLoop
from laconic.outer.fragments import apart, blocks, by_bytes, strided, whole
from laconic.outer.inner import Average, Keep, Reset
from laconic.outer.joined import Joined, joined
from laconic.outer.merge import Blend, Correct, Replace
from laconic.outer.recipe import Recipe
from laconic.outer.recipes import (
    diloco,
    eager_diloco,
    edit,
    gossip,
    hierarchical,
    local_sgd,
    noloco,
    post_local_sgd,
    quadratic,
    slowmo,
    sparse_loco,
    streaming_diloco,
)
from laconic.outer.report import Round, Stats
from laconic.outer.schedule import ByTime, Every, Levels, Quadratic, Streaming, Warmup
from laconic.outer.weigh import ByWork, ClippedToMedian, WithoutOutliers

__all__ = [
    "E3M0",
    "Average",
    "Blend",
    "ByTime",
    "ByWork",
    "Cast",
    "ClippedToMedian",
    "Correct",
    "ErrorFeedback",
    "Every",
    "Fp8",
    "GatherMean",
    "Gossip",
    "Identity",
    "Int4",
    "Int8",
    "Joined",
    "Keep",
    "Levels",
    "Mean",
    "OuterLoop",
    "Quadratic",
    "Recipe",
    "ReduceScatterMean",
    "Replace",
    "Reset",
    "Round",
    "Stats",
    "Streaming",
    "TopK",
    "TrimmedMean",
    "Warmup",
    "WithoutOutliers",
    "apart",
    "blocks",
    "by_bytes",
    "diloco",
    "eager_diloco",
    "edit",
    "gossip",
    "hierarchical",
    "joined",
    "local_sgd",
    "noloco",
    "post_local_sgd",
    "quadratic",
    "slowmo",
    "sparse_loco",
    "streaming_diloco",
    "strided",
    "whole",
]
