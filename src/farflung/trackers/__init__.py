# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers: where metrics go."""
