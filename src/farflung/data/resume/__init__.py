# SPDX-License-Identifier: Apache-2.0
"""The position of a loader's iteration, and how another process continues from it."""
