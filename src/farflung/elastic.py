# SPDX-License-Identifier: Apache-2.0
"""Replicas that come and go: the membership of an outer loop in a run of `farflung launch --elastic`."""

from farflung.hosts.elastic import launched_membership as launched_membership, place as place
from farflung.members.elastic import Elastic as Elastic
