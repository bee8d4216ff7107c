# SPDX-License-Identifier: Apache-2.0
"""Settings files with anchors, aliases, merges and depth: each is read or refused in a sentence, and soon."""

import io
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from farflung.base.errors import FarflungError
from farflung.compat.cluster import ClusterConfig
from farflung.config.files import read_file
from farflung.launch.codes import DONE, ENGINE, USAGE
from tests.python import call_farflung

_LEVELS = [f"  b{k}: &b{k} {{{', '.join(f'x{n}: *b{k - 1}' for n in range(9))}}}\n" for k in range(1, 12)]
_BOMB = f"deepspeed_config:\n  b0: &b0 {{x: no}}\n{''.join(_LEVELS)}"
_LEAVES = ["1", "no", "*a", "*b", "&a 1", "&b no", "~", "'x'", "&a [*a]", "{<<: *b}", "1e3", "2001-99-99", "{[1]: 2}"]
_NODES = st.recursive(
    st.sampled_from([*_LEAVES, "[" * 99]),
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
_LINES = st.lists(st.tuples(_KEYS, _NODES), max_size=5)
# All commands that read a file of settings.
_COMMANDS = {
    "launch": ["launch", "--dry-run", "--config_file", "x.yaml", "train.py"],
    "env": ["env", "--config_file", "x.yaml"],
    "show": ["config", "show", "--config_file", "x.yaml"],
    "test": ["test", "--config_file", "x.yaml"],
    "doctor": ["doctor", "--config_file", "x.yaml"],
    "to-fsdp2": ["to-fsdp2", "--config_file", "x.yaml", "--output_file", "y.yaml", "--overwrite"],
}


_ALIASES = ["deepspeed_config: &a {x: *a}\n", "role: &a [*a]\nrole: &b [*b]\n", "outer: &a {every: *a}\n"]


@pytest.mark.parametrize("text", [_BOMB, *_ALIASES])
def test_an_alias_is_refused_with_its_line(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(FarflungError, match=r"x.yaml:\d+: `\*\w+` is a YAML alias"):
        read_file(tmp_path / "x.yaml")


def called(*words):
    with redirect_stderr(io.StringIO()) as said, redirect_stdout(io.StringIO()):
        return call_farflung(*words), said.getvalue()


@pytest.fixture
def folder(home, monkeypatch):
    """A folder with a script, where commands that would start processes or measure machines only read settings."""
    (home / "train.py").touch()
    nothing = SimpleNamespace(goes_on=False, is_lone=False, todo=(), described=str, as_text=str, prepare=dict)
    nothing.follow = lambda folder: DONE
    monkeypatch.setattr("farflung.launch.start.starter_of", lambda resolved, script: nothing)
    monkeypatch.setattr("farflung.doctor.report.examine", lambda asked, tell: nothing)
    monkeypatch.setattr("farflung.launch.ask.count_gpus", lambda: 0)
    return home


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=_LINES)
@pytest.mark.parametrize("command", _COMMANDS)
def test_each_command_reads_any_file_or_refuses_it_in_a_sentence(command, folder, lines):
    (folder / "x.yaml").write_text("".join(f"{key}: {node}\n" for key, node in lines))
    code, said = called(*_COMMANDS[command])
    assert code in (DONE, USAGE, ENGINE), said
    assert code == DONE or "Error: " in said or "Unsupported: " in said, said


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("text", [_BOMB, "a: " + "[" * 50_000, "fsdp_config: [1]\n", "x: &a {<<: *a}\n"])
def test_each_command_answers_a_hostile_file_in_a_sentence(command, text, folder):
    (folder / "x.yaml").write_text(text)
    code, said = called(*_COMMANDS[command])
    assert (code, said.startswith("ConfigError: ")) == (USAGE, True), said
    with pytest.raises(FarflungError):
        ClusterConfig.from_yaml_file(folder / "x.yaml")
