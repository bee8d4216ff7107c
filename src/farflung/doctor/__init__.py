# SPDX-License-Identifier: Apache-2.0
"""Asks machines, the lines between them and addresses, before a run needs them."""
