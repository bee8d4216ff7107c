# SPDX-License-Identifier: Apache-2.0
"""How values look on the wire."""
