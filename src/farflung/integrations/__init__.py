# SPDX-License-Identifier: Apache-2.0
"""Integrations: how libraries that are written for Accelerate run on Farflung."""
