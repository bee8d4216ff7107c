# SPDX-License-Identifier: Apache-2.0
"""A replica that was late comes back with its own steps, unless the others may have applied a part of them."""

from functools import partial

import pytest
import torch
from torch import nn

from farflung.address.member_store import Post, Record, encode
from farflung.base.errors import CollectiveMismatch, RankFailure
from farflung.comm.group import SoloGroup
from farflung.members.settlement import decide
from farflung.outer import Cast, OuterLoop, diloco, edit, local_sgd, sparse_loco, streaming_diloco
from farflung.testing.patience import patience
from farflung.votes.generation import ALL, Reached, Void
from tests.faults import stop
from tests.outer.conftest import in_turn
from tests.outer.elastic_run import EVERY, START, ElasticRun
from tests.outer.replicas import shift
from tests.outer.test_elastic_laws import Members, needs


def rounds_of(said, first):
    """The rounds of a member that took part in all, each with the steps of a member since the one before."""
    before = 0
    for one in (one for one in said if one["member"] == first and "round" in one):
        yield one["step"] - before, one
        before = one["step"]


def counted(said, first, member):
    """How many steps of a replica were in the rounds of the first one."""
    return sum(steps for steps, one in rounds_of(said, first) if one["weights"].get(member, 0) > 0)


def check_each_round(said, moves):
    """Check that rounds moved the anchor by the mean of their members' `moves` in a step; the first is in all."""
    first, anchor = min(moves), START
    mine = [one for one in said if one["member"] == first]
    weights = {one["position"]: one["weight"] for one in mine if "position" in one}
    weights[mine[-1]["end"]] = mine[-1]["weight"]
    for steps, one in rounds_of(said, first):
        anchor -= sum(steps * weight * moves[member] for member, weight in one["weights"].items())
        assert weights[one["step"]] == anchor, one


@pytest.mark.law("late-is-not-lost")
@pytest.mark.parametrize(("phase", "address"), in_turn(["local step", "vote", "landing"]), indirect=["address"])
def test_the_steps_of_a_stopped_replica_count_in_the_next_round(phase, address):
    """It is stopped before the others have got any of its values, or once all know that they have all of them."""
    at = 4 * EVERY + 2 if phase == "local step" else 5
    with ElasticRun(address=address, expected=2, grace_s=patience(1.0)) as run:
        first, late = run.start(0), run.start(1, dies=(phase, at, stop), moves=3)
        run.lets_back(late, 1, 3 * EVERY)
        run.until(lambda: any(one.get("generation", 0) > 2 for one in list(run.said) if one["member"] == late))
        said = run.finish()
        stats = {one["member"]: one["stats"] for one in said if "end" in one}
        assert stats.keys() == {first, late}
        assert len({one["weight"] for one in said if "end" in one}) == 1
        check_each_round(said, {first: 1, late: 3})
        assert (stats[late]["steps_lost"], stats[late]["replicas_joined"]) == (0, 0)  # it doesn't count itself
        assert counted(said, first, late) == stats[late]["steps"] < counted(said, first, first)


@pytest.mark.parametrize(("phase", "address"), in_turn(["arrival", "confirmation"]), indirect=["address"])
def test_steps_that_others_may_have_applied_are_not_sent_again(phase, address):
    with ElasticRun(address=address, expected=2, grace_s=patience(1.0)) as run:
        first, late = run.start(0), run.start(1, dies=(phase, 5, stop), moves=3)
        run.lets_back(late, 1)
        said = run.finish()
        stats = {one["member"]: one["stats"] for one in said if "end" in one}
        assert stats.keys() == {first, late}
        assert len({str(one["weight"]) for one in said if "end" in one}) == 1
        known = counted(said, first, late) + stats[late]["steps_lost"]
        assert known - stats[late]["steps"] in (0, stats[late]["steps_lost"])  # lost as far as it knows


def test_late_replicas_agree_with_the_others_where_rounds_overlap_with_training():
    recipe = streaming_diloco(8, 2, delay=2, lr=1.0, momentum=0.0)
    with ElasticRun(recipe=recipe, expected=2, grace_s=patience(0.5)) as run:
        first, late = run.start(0), run.start(1, dies=("local step", 20, stop), moves=3)
        run.lets_back(late, 1)
        ends = {one["member"]: str(one["weight"]) for one in run.finish(20) if "end" in one}
        assert ends.keys() == {first, late}
        assert len(set(ends.values())) == 1


def test_with_rounds_by_time_a_replica_three_times_slower_is_never_late(tmp_path):
    options = {"expected": 2, "grace_s": patience(4.0)}
    with ElasticRun(address=tmp_path.as_uri(), recipe=edit(seconds=0.3), step_s=0.01, **options) as run:
        fast, slow = run.start(0), run.start(1, slower=3)
        run.until(lambda: sum("round" in one and one["member"] == slow for one in list(run.said)) >= 4, 60.0)
        rounds = [one["weights"] for one in list(run.said) if "round" in one]  # before one of them has no more to do
        said = run.finish()
        assert not any("is out" in event for event in run.events)
        ends = {one["member"]: one for one in said if "end" in one}
        assert ends.keys() == {fast, slow}
        assert ends[fast]["weight"] == ends[slow]["weight"]
        assert all(one.keys() == {fast, slow} and min(one.values()) > 0 for one in rounds)


# ---- without processes


# The generations after the first one, in which member 2 had a round of vote 5 open; if it knows that none is applied.
OUT = {
    "nothing applied": ([Record(2, 1, (1,), common={5: 0})], True),
    "the vote never came": ([Record(2, 1, (1,)), Record(3, 1, (1, 4), (4,), past=9)], True),
    "a bucket applied": ([Record(2, 1, (1,), common={5: 1})], False),
    "the others have closed it": ([Record(2, 1, (1,), common={6: 0}, ended=7)], False),
    "the others had it open": ([Record(2, 1, (1,), common={5: 0}, ended=6)], True),
    "it is the odd one": ([Record(2, 1, (1,), odd=(2,))], False),
    "it posted, and was stopped then": ([Record(2, 1, (1, 2), common={5: 2}), Record(3, 1, (1,))], False),
    "a newcomer came after the vote": ([Record(2, 1, (1, 2, 4), (4,), past=6), Record(3, 1, (1, 4))], False),
    "a newcomer came before the vote": ([Record(2, 1, (1, 2, 4), (4,), past=5), Record(3, 1, (1, 4))], True),
    "too long ago": ([Record(number, 1, (1,)) for number in range(2, 30)], False),
}


@pytest.mark.law("late-is-not-lost")
@pytest.mark.parametrize("case", OUT)
def test_one_that_was_left_out_knows_from_the_records_whether_others_have_applied_its_values(case):
    (after, expected), members = OUT[case], Members(Record(1, 1, (1, 2)))
    assert all(map(members.board.append, after))
    assert members.member(2)._know_unapplied([5]) is expected


@pytest.mark.law("every-wait-has-an-end-and-a-line")
def test_one_that_was_stopped_while_others_were_let_in_finds_that_it_was_left_out():
    members = Members(Record(1, 1, (1, 2)))
    member = members.member(2)
    assert all(map(members.board.append, OUT["a newcomer came before the vote"][0]))
    with pytest.raises(RankFailure, match="have entered a later generation without this replica"):
        member.enter(needs(True, admits=True))


LATE, ELSEWHERE = {3: "it was late"}, "it was at another call than the others"
# Reports after a loss, by member, and what follows from them in the next generation.
REPORTS = [
    ({1: Post(6, True, {5: 3}), 2: Post(6, True, {5: 1})}, {"common": {5: 1}}),  # both have one bucket
    ({1: Post(6, True), 2: Post(7, True, {5: 2, 6: 0})}, {"common": {5: ALL, 6: 0}, "ended": 7}),  # 1 has closed vote 5
    ({1: Post(5, True), 2: Post(6, True, {5: 2})}, {"common": {5: 0}}),  # 1 has not come to it
    # 1 has closed vote 5 without a result, in which nobody had any more data; 2 has not got all ballots of it
    ({1: Post(6, True, {5: Void.LAST_EMPTY}), 2: Post(6, True, {5: 0})}, {"common": {5: Void.LAST_EMPTY}}),
    # 2 is in an act that 1 has not come to, and 1 in a later round
    (
        {1: Post(7, True), 2: Post(6, True, in_act=True)},
        {"ids": (1,), "odd": (2,), "lost": {**LATE, 2: ELSEWHERE}, "ended": 7},
    ),
    ({1: Post(6, True, acts=2), 2: Post(6, True, acts=1)}, {"acts": 2}),  # 2 lacks the marks alone
    ({1: Post(6, True, {}, {2: "odd"}), 2: Post(7, True)}, {"ids": (1,), "lost": {**LATE, 2: "odd"}, "odd": (2,)}),
    ({1: Post(6, True, {}, {2: "odd"}), 2: Post(6, True, {}, {1: "odd"})}, {"disputes": 3}),
    (  # 4 has come back late, where the others are no more
        {1: Post(6, True, {}, {4: "odd"}), 2: Post(6, True, {}, {4: "odd"}), 4: Post(6, True, {}, {1: "odd"})},
        {"lost": {**LATE, 4: "odd"}, "odd": (4,)},
    ),
    (
        {1: Post(6, True, {}, {4: "odd"}), 2: Post(6, True), 4: Post(6, True, {}, {1: "odd"})},
        {"ids": (1, 2, 4), "disputes": 3},
    ),
    ({1: Post(9, False), 2: Post(6, True)}, {"ids": (2,)}),
    ({1: Post(1, False), 2: Post(6, False)}, {"began": 5}),
]


@pytest.mark.law("survivors-agree")
@pytest.mark.parametrize(("posts", "follows"), REPORTS)
def test_the_next_generation_follows_from_what_members_report(posts, follows):
    expected = {"ids": (1, 2), "lost": LATE, "began": 2, "ended": 6} | follows
    record = Record(4, 2, (1, 2, 3, *(4,) * (4 in posts)), began=2, disputes=2)
    assert decide(record, 1, posts, LATE) == Record(5, 1, **expected)


@pytest.mark.law("every-wait-has-an-end-and-a-line")
@pytest.mark.parametrize("disputes", [2, 3])
def test_members_that_accuse_each_other_again_and_again_end_by_name(disputes):
    """Two whose calls differ went from generation to generation: 100 to 200 of them in 20 s."""
    members = Members(Record(1, 1, (1, 2), disputes=disputes - 1))
    member = members.member(1)
    members.board.put(1, "post", 2, encode(Post(6, True, {}, {1: "a float64"})).decode())
    accuse = partial(member.agree, 6, Reached(), {2: "a float32"})
    if disputes < 3:
        assert accuse() == Reached()
    else:
        with pytest.raises(CollectiveMismatch, match=r"1 and .*2 .*in 3 generations in a row.*a float32"):
            accuse()


class Weights(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.one = nn.Parameter(torch.arange(12.0).view(3, 4).t().to(dtype))  # not contiguous
        self.other = nn.Parameter(torch.zeros(7, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [None, Cast("fp16")])
def test_what_is_kept_is_the_way_from_the_anchor(dtype, codec):
    def loop_of(model):
        recipe = diloco(4, lr=1.0, momentum=0.0, **({} if codec is None else {"codec": codec}))
        return OuterLoop(model, recipe, SoloGroup(), bucket_bytes=32)

    mine, theirs = Weights(dtype), Weights(dtype)
    with loop_of(mine) as outer, loop_of(theirs) as other:
        (fragment,), (given,) = outer._rounds.replica.fragments, other._rounds.replica.fragments
        shift(theirs.parameters(), 32)
        other.reset_anchor()
        for _ in range(3):
            shift(mine.parameters(), -2)
            outer.step()
        fragment.join(given.replicated(), keeps=True)
        for name, parameter in mine.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(name) - 6)
        assert fragment.pending_weight == [3.0]
        outer.step()  # the round includes all of it
        assert torch.equal(mine.other, theirs.other - 6)
        fragment.join(given.replicated(), keeps=False)
        assert fragment.pending_weight == [0.0]
        assert torch.equal(mine.one, theirs.one)


def test_steps_can_be_kept_if_an_anchor_tells_them_from_what_all_share_and_no_round_is_half_applied():
    replicas = [OuterLoop(Weights(), recipe, SoloGroup())._rounds.replica for recipe in (diloco(4), local_sgd(4))]
    assert [one.is_shared() for one in replicas] == [True, True]
    for one in replicas:
        one.count(1.0)
    assert [(one.is_shared(), one.may_keep()) for one in replicas] == [(True, True), (False, False)]
    replicas[0].fragments[0].num_landed = 1
    assert not replicas[0].is_shared()


@pytest.mark.parametrize("keeps", [False, True])
def test_what_error_feedback_holds_goes_with_the_steps(keeps):
    with OuterLoop(Weights(), sparse_loco(2), SoloGroup()) as outer:
        (fragment,) = outer._rounds.replica.fragments
        (residual,) = fragment.weights.rows()["residual"]
        residual.fill_(3.0)
        fragment.join(fragment.replicated(), keeps)
        assert bool((residual == 3.0 * keeps).all())
