# SPDX-License-Identifier: Apache-2.0
"""What an error says, for tests that compare it between ranks."""

from collections.abc import Callable
from typing import Any

import pytest


def error_of(kind: type[BaseException], act: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Call `act`, which must raise an error of this kind; return its message."""
    with pytest.raises(kind) as caught:
        act(*args, **options)
    return str(caught.value)
