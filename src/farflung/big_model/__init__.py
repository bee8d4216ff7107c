# SPDX-License-Identifier: Apache-2.0
"""Models that are larger than a device: where each part goes, how it comes there, and what runs it."""
