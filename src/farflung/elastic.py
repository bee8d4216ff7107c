# SPDX-License-Identifier: Apache-2.0
"""Runs of `farflung launch --elastic`: a replica's membership in one, and who reads its weights from outside."""

from farflung.address.reader import Reader as Reader, Version as Version
from farflung.hosts.elastic import launched_membership as launched_membership, place as place
from farflung.members.elastic import Elastic as Elastic
