# SPDX-License-Identifier: Apache-2.0
"""A forwarded property reads one attribute of a part, and writes it where a check allows that."""

import pytest

from farflung.base.checks import check_flag
from farflung.base.errors import ConfigError
from farflung.base.forward import Forward, unchecked


class Part:
    def __init__(self):
        self.size, self.is_open = 2, False


class Whole:
    size = Forward[int]("part.size", "Its size.")
    is_open = Forward[bool]("part.is_open", "Whether it is open.", check_flag)
    anything = Forward[int]("part.size", "Its size.", unchecked)

    def __init__(self):
        self.part = Part()


def test_a_forwarded_property_reads_checks_and_writes_the_part():
    whole = Whole()
    assert (whole.size, whole.is_open, Whole.size.__doc__) == (2, False, "Its size.")
    whole.is_open, whole.anything = True, 3
    assert (whole.part.is_open, whole.part.size) == (True, 3)
    with pytest.raises(ConfigError, match="is_open"):
        whole.is_open = "often"
    with pytest.raises(AttributeError, match="set"):
        whole.size = 3
