# SPDX-License-Identifier: Apache-2.0
"""Shows a run from the files in its folder alone, so that it shows finished and dead ones as well."""
