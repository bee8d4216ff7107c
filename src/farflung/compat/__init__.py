# SPDX-License-Identifier: Apache-2.0
"""What exists for Accelerate's names alone: the doors import it, and no room below does."""
