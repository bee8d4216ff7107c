# SPDX-License-Identifier: Apache-2.0
"""The cause of a failure is recorded where an error is raised; only foreign errors are told apart by their words."""

import pickle

import pytest

from farflung.base.causes import Cause, cause_of, cause_of_meeting, gloo_limit_s
from farflung.base.errors import (
    CheckpointError,
    CollectiveMismatch,
    ConfigError,
    RankFailure,
    StateError,
    Unreachable,
    Unsupported,
)

GLOO = "[enforce fail at pair.cc:553] Connection closed by peer [127.0.0.1]:1"
LATE = "[gloo] Timed out waiting 5000ms for recv operation to complete"


def raised(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("Connection closed by peer"), Cause.OWN),
        (BrokenPipeError("Broken pipe"), Cause.OWN),  # of the script, to another program
        (RuntimeError("CUDA out of memory"), Cause.OWN),
        (RuntimeError(GLOO), Cause.PEER),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), Cause.PEER),
        (RuntimeError(LATE), Cause.LATE),
        (RankFailure("rank 1 left (RuntimeError: Timed out waiting 5ms)"), Cause.PEER),
        (RankFailure("rank 1 did not come", Cause.LATE), Cause.LATE),
        (pickle.loads(pickle.dumps(RankFailure("rank 1 did not come", Cause.LATE))), Cause.LATE),
        (raised(ValueError("no batch"), RankFailure("rank 1 left")), Cause.PEER),
        (raised(ValueError("no batch"), raised(KeyError(1), RuntimeError(LATE))), Cause.LATE),
        (raised(CheckpointError("not written"), RuntimeError(GLOO)), Cause.OWN),
        (ConfigError("timeout is 0"), Cause.WRONG_USE),
        (StateError("it has ended"), Cause.WRONG_USE),
        (Unsupported("a hook"), Cause.WRONG_USE),
        (CollectiveMismatch("[8] and [6]"), Cause.WRONG_USE),
        (Unreachable("no answer"), Cause.ENGINE),
    ],
)
def test_an_error_has_the_cause_that_was_recorded_or_that_gloo_and_nccl_show(error, cause):
    assert cause_of(error) is cause


def test_a_meeting_that_ran_out_of_time_is_told_from_one_that_could_not_begin():
    assert cause_of_meeting(RuntimeError("The client socket has timed out after 5000ms")) is Cause.NOT_MET
    assert cause_of_meeting(RuntimeError("machine 0 can't listen at 10.0.0.1: denied")) is Cause.ENGINE


def test_the_limit_of_a_collective_of_gloo_is_read_from_its_error():
    assert gloo_limit_s(RuntimeError(LATE)) == 5.0
    assert gloo_limit_s(RuntimeError(GLOO)) is None
