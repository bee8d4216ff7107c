# SPDX-License-Identifier: Apache-2.0
"""How flags are spelled: `--num_processes` and `--num-processes` are one flag, in each command."""

from __future__ import annotations


def underscored(word: str) -> str:
    """Return a flag as its setting spells it."""
    return word.replace("-", "_")


BOTH_SPELLINGS = {"token_normalize_func": underscored, "help_option_names": ["-h", "--help"]}
