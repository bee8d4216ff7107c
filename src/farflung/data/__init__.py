# SPDX-License-Identifier: Apache-2.0
"""Which samples each rank sees, and how batches reach its device."""
