# SPDX-License-Identifier: Apache-2.0
"""The checksum of files and objects: zlib's CRC-32, which isal, if installed, computes by the processor's instructions.

It shows damage; against changes on purpose a run has a key.
"""

try:
    from isal.isal_zlib import crc32 as crc32  # 14 GB/s from memory and 75 from a cache, where zlib's is 1 to 4
except ImportError:  # a platform that it has no wheel for: the same sum, later
    from zlib import crc32 as crc32
