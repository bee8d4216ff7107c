# SPDX-License-Identifier: Apache-2.0
"""Door: XLA, which is not there."""

from farflung.base.absent import install_xla

__all__ = ["install_xla"]
