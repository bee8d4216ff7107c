# SPDX-License-Identifier: Apache-2.0
"""The outer loop: replicas that train alone and agree now and then."""

from laconic.outer.aggregate import Mean
from laconic.outer.codec.base import Cast, Identity
from laconic.outer.engine import OuterLoop
from laconic.outer.merge import Replace
from laconic.outer.recipes import Recipe, diloco, local_sgd
from laconic.outer.report import Stats
from laconic.outer.schedule import Every

__all__ = ["Cast", "Every", "Identity", "Mean", "OuterLoop", "Recipe", "Replace", "Stats", "diloco", "local_sgd"]
