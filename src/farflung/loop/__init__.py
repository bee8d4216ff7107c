# SPDX-License-Identifier: Apache-2.0
"""The state of the training loop and what depends on it: accumulation, optimizer, scheduler, clipping."""
