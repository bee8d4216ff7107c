# SPDX-License-Identifier: Apache-2.0
"""Replicas that come and go: the membership of an outer loop in a run of `farflung launch --elastic`."""

from farflung.integrations.elastic import launched_membership as launched_membership, place as place
from farflung.outer.elastic import Elastic as Elastic
