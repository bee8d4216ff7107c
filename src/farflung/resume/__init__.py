# SPDX-License-Identifier: Apache-2.0
"""What a run keeps in its checkpoints: a table of parts, each of which knows what is the same on all ranks."""
