# SPDX-License-Identifier: Apache-2.0
"""Where an iteration of a loader stands, and how another process goes on from there."""
