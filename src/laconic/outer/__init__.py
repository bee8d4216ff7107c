# SPDX-License-Identifier: Apache-2.0
"""The outer loop: replicas that train alone and agree now and then."""
