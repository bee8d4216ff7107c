# SPDX-License-Identifier: Apache-2.0
"""What can be seen of machines and runs from outside."""
