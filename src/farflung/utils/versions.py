# SPDX-License-Identifier: Apache-2.0
"""Door: versions of libraries."""

from farflung.base.optional import compare_versions as compare_versions
from farflung.compat.probes import is_torch_version as is_torch_version
