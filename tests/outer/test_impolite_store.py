# SPDX-License-Identifier: Apache-2.0
"""Runs of three replicas in a bucket whose server is impolite by chance: each end is right, or says why and what to do.

Runs of odd seeds have a key, and those of each third seed are in a Storage Bucket of Hugging Face. With
FARFLUNG_IMPOLITE_SEEDS=200 there are as many runs; with 20:200 those from 20 on.
"""

import os
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from safetensors.torch import load_file

from farflung.address.reader import Reader
from farflung.base.errors import ConfigError
from farflung.testing.patience import patience
from tests.outer.elastic_run import EVERY, START, ElasticRun

FIRST, _, LAST = os.environ.get("FARFLUNG_IMPOLITE_SEEDS", "0").rpartition(":")
SEEDS = range(int(FIRST or 0), int(LAST)) or (1, 2, 4, 5, 6, 11)  # one for each of what may happen
ROUNDS, GRACE_S, PATIENCE_S = 4, 12.0, 8.0
MOVES = (3, 6, 12)  # of the replicas in each step: the mean of any of them is exact, and no two have the same
REFUSED = [{"create": one} for one in ("NotImplemented", "InvalidArgument", "ignored")]
REFUSED += [{"denied": [one]} for one in ("Put", "Get", "List", "Delete")]
PASSING = ("SlowDown", "InternalError", "AccessDenied", "ExpiredToken", "ConditionalRequestConflict")
LASTING = ("AccessDenied", "ExpiredToken", "NoSuchBucket", "InvalidAccessKeyId", "InternalError")
VANISH = ("", "/loop1/", "/loop1/generations/", "/ids/", "/name/", "/g[0-9]+/", "/state/", "/in/")
REMEDIES = "may lack a permission|of a token that may not|start this again|Create the bucket|Check "
REMEDIES += "|create an object only|heed that condition"


def manners_of(seed):
    """How the server is from the start, what happens, and when."""
    chance = random.Random(seed)
    product = {
        "seed": seed,
        "page": chance.choice([2, 7, 1000]),
        "bulk": chance.choice(["", "", "NotImplemented", "InvalidArgument"]),
        "late_s": chance.choice([0.0, 0.0, 0.02, 0.1]),
        "listing_late_s": chance.choice([0.0, 0.0, 0.5, 3.0]),
        "conflicts": chance.choice([0.0, 0.1, 0.3]),
        "lost": chance.choice([0.0, 0.02, 0.1]),
        "storm": chance.choice([0.0, 0.05, 0.2]),
    }
    event = chance.choice(["nothing", "refused", "passing", "passing", "lasting", "lasting", "vanish", "killed"])
    at = chance.randint(1, EVERY * (ROUNDS - 1))
    what = {}
    if event == "refused":
        what = chance.choice(REFUSED)
    elif event == "passing":
        what = {"then": chance.choice(PASSING), "for_s": chance.uniform(0.3, 3.0)}
    elif event == "lasting":
        what = {"then": chance.choice(LASTING), "for_s": 1e9}
    elif event == "vanish":
        what = {"vanish": [chance.choice(VANISH)]}
    return product, event, what, at


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_each_step_is_counted_or_the_end_says_why(seed, s3, request, tmp_path, monkeypatch):
    bucket = request.getfixturevalue("hub" if seed % 3 == 2 else "bucket")
    if seed % 2:
        monkeypatch.setenv("FARFLUNG_KEY", "5" * 64)
    product, event, what, at = manners_of(seed)
    print(f"seed {seed}: {product}, {event} {what} at step {at}")
    if event == "refused":
        s3.set(**product, **what)
        with pytest.raises(ConfigError, match=rf"Replicas can't meet at {bucket}\. .*({REMEDIES})"):
            ElasticRun(address=bucket, patience_s=patience(PATIENCE_S))
        return
    s3.set(**product)
    grace_s, patience_s = patience(GRACE_S), patience(PATIENCE_S)
    options = {"grace_s": grace_s, "patience_s": patience_s, "step_s": 0.02}
    # One is late for so long, or requests fail for so long; a look at a listing that may be late; a busy machine.
    longest_s = grace_s + patience_s + patience(40.0)
    with ElasticRun(address=bucket, folder=tmp_path, expected=3, **options) as run:
        run.board.put("last", str(EVERY * ROUNDS).encode())
        moves = {run.start(name, moves=moves): moves for name, moves in enumerate(MOVES)}
        run.until(lambda: run.at(at) or len(run.codes) == 3, 60.0)
        if event == "killed":
            victim = random.Random(seed).choice(list(moves))
            run.signal(victim, 9)
            run.until(lambda: run.has_ended(victim))
        elif what:
            if event == "lasting":
                run.leave_store()
            s3.set(**product, **what)
        run.until(lambda: len(run.codes) == 3, 2 * longest_s)
        run.until(lambda: not run._pipes, 5.0)
        said, codes = run.said, run.codes
    s3.set()
    print(*run.events, *[one for one in said if "error" in one], codes, sep="\n")
    for member in moves:
        if event == "killed" and member == victim:
            continue
        mine = [one for one in said if one["member"] == member]
        (end,) = [one for one in mine if "end" in one or "error" in one]
        assert max((b["at"] - a["at"] for a, b in pairwise(mine)), default=0.0) < longest_s
        check_steps(mine, moves)
        if "end" in end:
            assert codes[member] == 0
            assert end["end"] == EVERY * ROUNDS
        elif "The run has ended: the others have done their work" in end["error"]:  # it was late
            assert event == "vanish"
            assert any("end" in one for one in said)
        else:
            assert event in ("lasting", "vanish"), end["error"]
            check_sentence(end["error"], said, tmp_path, has_state=any("round" in one for one in mine))
    ends = [one for one in said if "end" in one]
    if ends and not any("Continue with" in one.get("error", "") for one in said):
        # Where its records have vanished, the last state is kept by a member.
        kept = [one.as_uri() for one in tmp_path.glob("farflung-state-*")] if event == "vanish" else []
        assert weight_at((kept or [bucket])[0], tmp_path / "pulled") == (EVERY * ROUNDS, ends[-1]["weight"])


def check_steps(mine, moves):
    """The weights after each round are what those that took part have moved, and no step was left out unsaid."""
    weight, since = START, 0
    for one in mine:
        if "joined" in one:
            weight, since = one["weight"], one["joined"]
        elif "round" in one:
            weights = one["weights"]
            weight -= (one["step"] - since) * sum(n * moves[who] for who, n in weights.items()) / sum(weights.values())
            since = one["step"]
        elif one.get("position") == since or "end" in one:
            assert one["weight"] == pytest.approx(weight, abs=0.5), one
    if "end" in mine[-1]:
        made = sum("position" in one for one in mine)
        counted = sum(EVERY for one in mine if "round" in one and mine[0]["member"] in one["weights"])
        assert made == counted + mine[-1]["stats"].get("steps_lost", 0), mine[-1]


def check_sentence(error, said, folder, has_state):
    """An error names a cause and a remedy, and where the state is, if a round of this replica has landed."""
    assert re.search(
        f"{REMEDIES}|status code|InternalError|internal error|reduce your request rate|have vanished", error
    ), error
    found = re.search(r"shared state of the replicas lies in (\S+), from step (\d+)\. Continue with --meet file", error)
    if not has_state and found is None:
        assert "Start the run again from its newest checkpoint" in error
        return
    assert found, error
    place, step = Path(found[1]), int(found[2])
    assert place.parent == folder
    position, weight = weight_at(place.as_uri(), folder / "pulled")
    assert position == step
    assert any(one.get("weight") == weight for one in said if one.get("position") == step) or (
        weight == START and not step
    )


def weight_at(address, target):
    """The step and the weight of the newest state at an address."""
    step = int(re.search(r"after step (\d+)", Reader(address).newest().save(target))[1])
    (weight,) = {float(one) for tensor in load_file(target).values() for one in tensor.flatten()}
    return step, weight
