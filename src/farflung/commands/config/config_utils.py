# SPDX-License-Identifier: Apache-2.0
"""Door: questions, which `farflung config` asks."""

from farflung.base.absent import SubcommandHelpFormatter as SubcommandHelpFormatter
