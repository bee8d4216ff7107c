# SPDX-License-Identifier: Apache-2.0
"""Loops that drive an outer loop: an Accelerator, and scripts of other frameworks under `--outer`."""
