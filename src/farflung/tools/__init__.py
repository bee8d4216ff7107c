# SPDX-License-Identifier: Apache-2.0
"""Memory, looked at from the side of a run."""
