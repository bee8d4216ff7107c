# SPDX-License-Identifier: Apache-2.0
"""Instruments: looking at a run from the side."""
