# SPDX-License-Identifier: Apache-2.0
"""What is written to disk, and how."""
