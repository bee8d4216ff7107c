# SPDX-License-Identifier: Apache-2.0
"""The identity of a process in its world: rank, device, group, log, seed."""
