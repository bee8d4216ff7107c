# SPDX-License-Identifier: Apache-2.0
"""Where the examples are, and how tests run them in their own process, which takes less than to start another."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from farflung.state import AcceleratorState

FOLDER = Path(__file__).parents[2] / "examples"
PAGE = FOLDER.parent / "docs" / "examples.md"


def load(name: str) -> ModuleType:
    """Import an example, such as `features/memory`."""
    sys.path.insert(0, str((FOLDER / name).parent))
    return importlib.import_module(Path(name).name)


def run_script(name: str, words: str) -> Any:
    """Call an example's `main` with a command line, and forget its settings; return what it returns."""
    warnings.filterwarnings("error", module="farflung")
    try:
        return load(name).main(words.split())
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
