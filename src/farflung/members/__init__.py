# SPDX-License-Identifier: Apache-2.0
"""Which replicas take part in an elastic run: admission, loss, and the state that a newcomer gets."""
