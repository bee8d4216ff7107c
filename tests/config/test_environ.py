# SPDX-License-Identifier: Apache-2.0
"""The environment is read and changed in one place, and what it says is never guessed."""

from contextlib import suppress

import pytest

from farflung.base.errors import ConfigError
from farflung.config import environ
from farflung.config.launch import check_variables
from tests.python import call_farflung

NAME = "FARFLUNG_TEST_VARIABLE"


def test_words_that_mean_yes_and_no_are_known_and_others_refused():
    yes = dict.fromkeys(("1", "true", "True", "YES", "on", " y "), True)
    for word, means in {**yes, **dict.fromkeys(("0", "false", "False", "NO", "off", ""), False)}.items():
        with environ.patched({NAME: word}):
            assert environ.flag(NAME, default=not means) is means, word
    with environ.patched({NAME: "perhaps"}), pytest.raises(ConfigError, match=f"{NAME} is 'perhaps'"):
        environ.flag(NAME)


def test_the_first_number_that_is_set_counts():
    with environ.patched({NAME: "", f"{NAME}_2": "7", f"{NAME}_3": "8"}):
        assert environ.integer(NAME, f"{NAME}_2", f"{NAME}_3") == 7
        assert environ.integer(NAME) is None
        assert environ.number(NAME) is None
    with environ.patched({NAME: "7.5"}):
        assert environ.number(NAME) == 7.5
        with pytest.raises(ConfigError, match="must be an integer"):
            environ.integer(NAME)
    with environ.patched({NAME: "7s"}), pytest.raises(ConfigError, match="must be a number"):
        environ.number(NAME)


def test_an_empty_variable_of_torchs_is_one_that_is_not_set(monkeypatch):
    """torch raises for an empty LOGLEVEL, TORCH_LOGS or TORCH_DISTRIBUTED_DEBUG, and OpenMP complains of its own."""
    emptied = [
        "LOGLEVEL",
        "TORCH_LOGS",
        "TORCH_DISTRIBUTED_DEBUG",
        "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "NCCL_DEBUG",
    ]
    for name in (*emptied, "CUDA_VISIBLE_DEVICES", NAME):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TORCH_HOME", "home")
    call_farflung("--help")
    left = environ.snapshot()
    assert not {*emptied} & left.keys()
    assert (left["CUDA_VISIBLE_DEVICES"], left[NAME], left["TORCH_HOME"]) == ("", "", "home")  # which mean something


SERVICE = """
    FARFLUNG_PORT=tcp://10.0.0.1:80 FARFLUNG_SERVICE_HOST=10.0.0.1 FARFLUNG_SERVICE_PORT=80
    FARFLUNG_SERVICE_PORT_HTTP=80 FARFLUNG_PORT_80_TCP=tcp://10.0.0.1:80 FARFLUNG_PORT_80_TCP_PROTO=tcp
    FARFLUNG_PORT_80_TCP_PORT=80 FARFLUNG_PORT_80_TCP_ADDR=10.0.0.1 FARFLUNG_MAIN_PROCESS_PORT=tcp://[fd00::1]:80
    FARFLUNG_MEET_SERVICE_HOST=fd00::1 MASTER_PORT=tcp://10.0.0.1:80 ACCELERATE_PORT=udp://10.0.0.1:80
"""


def test_variables_of_kubernetes_services_are_nobodys_settings():
    with environ.patched(dict(word.split("=", 1) for word in SERVICE.split())):
        check_variables()
        assert environ.integer("MASTER_PORT") is None
        assert set(environ.named("FARFLUNG_")) == {"FARFLUNG_RUN_DIR"}
        assert environ.named("ACCELERATE_") == {}


@pytest.mark.parametrize("name", ["FARFLUNG_PORTS", "FARFLUNG_PORT", "FARFLUNG_SERVICE_HOST"])
def test_what_only_looks_like_a_service_is_still_refused(name):
    value = "80" if name == "FARFLUNG_PORT" else "tcp://10.0.0.1:80"
    with environ.patched({name: value}), pytest.raises(ConfigError, match=f"{name} is not a setting"):
        check_variables()


def test_what_is_patched_is_put_back_even_after_an_error():
    environ.export({NAME: "before"})
    with suppress(KeyError), environ.patched({NAME: None, f"{NAME}_2": "new"}):
        assert environ.text(NAME) is None
        assert environ.text(f"{NAME}_2") == "new"
        raise KeyError
    assert environ.text(NAME) == "before"
    assert environ.text(f"{NAME}_2") is None
    environ.remove(NAME, f"{NAME}_2")
    assert NAME not in environ.snapshot()
