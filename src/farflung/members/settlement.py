# SPDX-License-Identifier: Apache-2.0
"""Decides which members continue after a loss: they report their progress, wait for all survivors, and one decides."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from farflung.address.member_store import Post, Record, decode, encode
from farflung.base.errors import RankFailure
from farflung.base.events import Event, Kind
from farflung.members.admission import late_pause_s
from farflung.members.peers import Peers
from farflung.votes.generation import ALL

_CAUSES = 4  # pauses of the board, after which those that wait ask why some have not come


def settle(peers: Peers, member: int, post: Post, trains: bool = True) -> Record:
    """Meet the survivors of a generation, and return the next one; Unreachable without a board to decide on.

    Args:
        trains: see `Peers.cause`.
    """
    record, members = peers.record, peers.members
    assert record is not None
    began, asked, was_told = time.monotonic(), 0.0, False
    members.mark_broken(record.number, "members were lost")
    members.put(record.number, "post", member, encode(post).decode())
    while True:
        now = members.current()
        if now.number > record.number:
            return now
        is_complete = members.all_put(record.number, "post", record.ids)
        if is_complete or time.monotonic() > asked + _CAUSES * peers.pause_s:
            asked = time.monotonic()
            said = members.get(record.number, "post", record.ids)
            # Its own may be forgotten, if the others have decided in this moment.
            posts = {member: post} | {one: decode(Post, text.encode()) for one, text in said.items()}
            peers.mark_late()
            absent = peers.causes({one: asked - began for one in record.ids if one not in posts}, trains)
            if all(absent.values()):  # others that have come may have ended since
                come = [one for one in posts if one != member]
                ends = zip(come, peers.notes.board.map(partial(peers.notes.get, "gone"), come), strict=True)
                absent |= {one: why for one, why in ends if why}
                posts = {one: found for one, found in posts.items() if one not in absent}
            holders = _absent_holders(peers, record, posts, absent)
            if all(absent.values()) and not holders:
                new = decide(record, member, posts, absent)
                if members.append(new):
                    _send(peers, new, any(posts[one].has_state for one in new.ids))
                continue
            if holders and not was_told and min(posts) == member:
                who, why = ", ".join(map(peers.notes.name_of, posts)), peers.describe_missing(holders)
                peers.notes.send(Event.now(Kind.WAITS, who, why=why, is_member=True))
            was_told |= bool(holders)
            peers.await_holders(holders, asked - began if holders else 0.0)
        time.sleep(peers.pause_s)


def await_ready(peers: Peers, member: int, record: Record) -> None:
    """Wait until all members of a generation have come to it, newcomers with the state; RankFailure if one is lost.

    The wait for a newcomer starts again whenever more of the state has come to it.
    """
    members = peers.members
    began = asked = time.monotonic()
    progress: dict[int, tuple[str, float]] = {}  # of newcomers, and since when
    members.put(record.number, "ready", member)
    while not members.all_put(record.number, "ready", record.ids):
        time.sleep(peers.pause_s)
        if time.monotonic() < asked + _CAUSES * peers.pause_s:
            continue
        asked, come = time.monotonic(), members.get(record.number, "ready", record.ids)
        for one, text in members.get(record.number, "progress", record.newcomers).items():
            if progress.get(one, ("", 0.0))[0] != text:
                progress[one] = text, asked
        absent = [one for one in record.ids if one not in come]
        waited_s = {one: asked - progress.get(one, ("", began))[1] for one in absent}
        causes = peers.causes(waited_s, trains=False)  # all have agreed on the generation, or on its members
        late = [one for one, why in causes.items() if why]
        members.board.map(lambda one: members.put(record.number, "late", one), late)  # the settlement waits no longer
        found = [f"{peers.notes.name_of(one)}: {causes[one]}" for one in late]
        if members.current().number > record.number:
            found.append("the others have entered a later generation")
        if found:
            raise RankFailure("; ".join(found))


def decide(record: Record, member: int, posts: Mapping[int, Post], absent: Mapping[int, str]) -> Record:
    """Return the generation after `record`, of those members that have come.

    Args:
        member: the one that decides.
        posts: their reports, by id.
        absent: why the others have not come.
    """
    accusers = [post.odd for post in posts.values() if post.odd]
    accused = {one: why for post in accusers for one, why in post.items()}
    # By most of them: one that comes back late, where the others are no more, takes each of them for odd.
    odd = {one: why for one, why in accused.items() if 2 * sum(one in post for post in accusers) > len(accusers)}
    have = [one for one in record.ids if one in posts and posts[one].has_state]
    if elsewhere := _elsewhere(have, posts):  # which explains what they accuse each other of
        odd = dict.fromkeys(elsewhere, "it was at another call than the others")
    have = [one for one in have if one not in odd] or have
    ids = tuple(have or (one for one in record.ids if one in posts))  # or nobody is left who had anything
    complete = {one: posts[one].complete for one in ids}
    common = {}
    for vote in set().union(*complete.values()):
        has_passed = any(vote not in complete[one] and vote < posts[one].votes for one in ids)
        common[vote] = ALL if has_passed else min(complete[one].get(vote, 0) for one in ids)
    odd = {one: why for one, why in odd.items() if one not in ids}
    lost = {**absent, **odd}
    ended = max(posts[one].votes for one in ids)
    number = record.number + 1
    began = record.began if have else number
    disputes = record.disputes + 1 if accused and not odd else 0
    new = Record(number, member, ids, common=common, lost=lost, odd=tuple(odd), began=began, ended=ended)
    return replace(new, disputes=disputes, acts=max(posts[one].acts for one in ids))


def _elsewhere(have: Sequence[int], posts: Mapping[int, Post]) -> list[int]:
    """Return the members at another call than the others: some were in an act that others have gone past.

    The smaller group is returned; of two equal ones, the group without the first member.
    """

    def is_past(other: int, one: int) -> bool:
        there, here = posts[other], posts[one]
        return there.votes > here.votes and there.acts == here.acts and not there.in_act

    in_act = [one for one in have if posts[one].in_act and any(is_past(other, one) for other in have)]
    others = [one for one in have if one not in in_act]
    return min([in_act, others], key=lambda some: (len(some), some[:1] == have[:1])) if in_act else []


def _absent_holders(
    peers: Peers, record: Record, posts: Mapping[int, Post], absent: Mapping[int, str]
) -> dict[int, str]:
    """Return the only members that hold the trained state, and are not known to have ended."""
    if not all(absent.values()) or any(post.has_state for post in posts.values()):
        return {}
    return {one: why for one, why in absent.items() if not peers.heartbeats.ended(one) and peers.may_hold(record, one)}


def _send(peers: Peers, new: Record, has_state: bool) -> None:
    """Send events: which members continue, and which are out."""
    notes, there = peers.notes, {"replicas": len(new.ids)}

    def send_lost(member: int) -> None:
        name, why = notes.name_of(member), new.lost[member]
        facts = {**there, "has_state": has_state, **_late_facts(peers, member)}
        notes.send(Event.now(Kind.LOST, name, new.number, why=why, **facts))
        if not notes.get("gone", member):  # else its launcher knows better
            notes.send_to_launcher(member, Event.now(Kind.LOST, name, why=why, asks_again=True))

    notes.board.map(send_lost, new.lost)
    if not new.lost:
        notes.send(Event.now(Kind.RECONNECTED, "", new.number, **there, why=peers.members.broken(new.number - 1)))


def _late_facts(peers: Peers, member: int) -> dict[str, float]:
    """Count that a replica was late, unless its absence has another reason; return how often, and how long it waits."""
    if peers.heartbeats.ended(member) or peers.heartbeats.unheard(member):
        return {}
    num_lates = peers.notes.count_late(member)
    return {"num_lates": num_lates, "pause_s": late_pause_s(num_lates)}
