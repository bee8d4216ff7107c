# SPDX-License-Identifier: Apache-2.0
"""How gradients come together: on one process, under DDP, or over the shards of FSDP."""
