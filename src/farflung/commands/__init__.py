# SPDX-License-Identifier: Apache-2.0
"""Door: where programs look for the commands as functions."""
