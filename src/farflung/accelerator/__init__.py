# SPDX-License-Identifier: Apache-2.0
"""The object that users hold: it delegates, nothing else."""
