# SPDX-License-Identifier: Apache-2.0
"""Talking between ranks: groups, flat buffers, packets and the collectives over nested data."""
