# SPDX-License-Identifier: Apache-2.0
"""What kubelet does with the words of a command, without any package of Kubernetes."""

from __future__ import annotations

import re


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return what kubelet makes of a word of `command`.

    Its reference: `$(VAR_NAME)` is replaced; of a variable that there is not, the reference stays as it is. `$$` is
    reduced to `$`, so `$$(VAR_NAME)` produces the literal `$(VAR_NAME)`, and escaped references are never expanded.
    """

    def of(match: re.Match[str]) -> str:
        return "$" if match["name"] is None else variables.get(match["name"], match[0])

    return re.sub(r"\$\$|\$\((?P<name>[^)]*)\)", of, text)
