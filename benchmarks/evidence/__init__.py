# SPDX-License-Identifier: Apache-2.0
"""Experiments on what an outer loop keeps of data parallelism's gain, on models small enough for many seeds."""
