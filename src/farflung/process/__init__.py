# SPDX-License-Identifier: Apache-2.0
"""Who am I in the world: rank, device, group, log, seed."""
