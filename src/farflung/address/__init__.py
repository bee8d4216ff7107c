# SPDX-License-Identifier: Apache-2.0
"""Where members meet: boards of records, and transports, over TCP, folders and buckets."""
