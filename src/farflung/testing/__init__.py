# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one machine, for tests and for trying things out."""
