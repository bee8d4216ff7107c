# SPDX-License-Identifier: Apache-2.0
"""Door: XLA, which is not there."""

from farflung.base.absent import install_xla as install_xla
