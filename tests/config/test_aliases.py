# SPDX-License-Identifier: Apache-2.0
"""Settings files with anchors, aliases, merges and depth: each is read or refused in a sentence, and soon."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings, strategies as st

from farflung.base.errors import FarflungError
from farflung.config.files import read_file

_LEVELS = [f"  b{k}: &b{k} {{{', '.join(f'x{n}: *b{k - 1}' for n in range(9))}}}\n" for k in range(1, 12)]
_BOMB = f"deepspeed_config:\n  b0: &b0 {{x: no}}\n{''.join(_LEVELS)}"
_LEAVES = st.sampled_from(["1", "no", "*a", "*b", "&a 1", "&b no", "~", "'x'", "&a [*a]", "{<<: *b}", "1e3"])
_NODES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: f"[{', '.join(parts)}]"),
        st.lists(inner, max_size=3).map(lambda parts: f"&b [{', '.join(parts)}]"),
        st.tuples(
            st.sampled_from(["", "&a ", "&b "]), st.sampled_from(["num_processes", "<<", "outer", "*a"]), inner
        ).map("{0[0]}{{{0[1]} : {0[2]}}}".format),
    ),
    max_leaves=12,
)
_KEYS = st.sampled_from(["num_processes", "mixed_precision", "outer", "fsdp_config", "deepspeed_config", "<<", "zz"])


@pytest.mark.parametrize(
    "text",
    [
        _BOMB,
        "deepspeed_config: &a {x: *a}\n",
        "mixed_precision: &a [*a]\nmixed_precision: &b [*b]\n",
        "outer: &a {every: *a}\n",
    ],
)
def test_an_alias_is_refused_with_its_line(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(FarflungError, match=r"x.yaml:\d+: `\*\w+` is a YAML alias"):
        read_file(tmp_path / "x.yaml")


@settings(max_examples=300, deadline=None)
@given(lines=st.lists(st.tuples(_KEYS, _NODES), max_size=5))
def test_any_file_is_read_or_refused_in_a_sentence(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("yaml") / "x.yaml"
    path.write_text("".join(f"{key}: {node}\n" for key, node in lines))
    with suppress(FarflungError):
        read_file(path)
