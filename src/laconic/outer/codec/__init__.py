# SPDX-License-Identifier: Apache-2.0
"""What a delta looks like on the wire."""
