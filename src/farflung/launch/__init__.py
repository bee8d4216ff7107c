# SPDX-License-Identifier: Apache-2.0
"""The command, and how it starts processes."""
