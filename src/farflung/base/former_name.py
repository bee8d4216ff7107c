# SPDX-License-Identifier: Apache-2.0
"""The name that the project had before 0.1.0: configuration files and checkpoints written under it are still read."""

from __future__ import annotations

FORMER_NAME = "laconic"
