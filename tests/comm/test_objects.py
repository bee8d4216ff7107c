# SPDX-License-Identifier: Apache-2.0
"""Objects as records and as a way to meet: who creates one first, what ends a wait, and that nothing grows."""

import json
import os
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader, BytesIO
from itertools import pairwise, product
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
import torch

from farflung.address import objects
from farflung.address.folder import FolderBoard, folder_at
from farflung.address.object_group import ObjectGroup
from farflung.address.packed import Damaged, packed, unpack
from farflung.address.schemes import transport_at
from farflung.address.seal import Seal, SealError
from farflung.base.errors import RankFailure, Unreachable
from farflung.comm.torch_group import TorchGroup
from farflung.outer import GatherMean, Int4, ReduceScatterMean, TopK
from farflung.testing.patience import patience
from farflung.testing.ranks import fork_context, run_ranks
from farflung.testing.sim import run_replicas
from tests.outer.test_aggregate import aggregated
from tests.s3_server import given_variables
from tests.waits import until

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]


class Watch:
    """Keeps what it is told, and ends nothing."""

    connect_s = 5.0

    def __init__(self):
        self.reasons, self.authors, self.looks, self.ends = [], [], [], []

    def look(self, entered, waited_s):
        self.looks.append((*entered, waited_s > 0))

    def note_end(self, entered, waited_s):
        self.ends.append((*entered, waited_s > 0))

    def break_off(self, reason, author=None):
        self.reasons.append(reason)
        self.authors.append(author)
        return RankFailure(reason)


FAR = [pytest.param(name, marks=pytest.mark.long) for name in ("bucket", "hub")]


@pytest.fixture(params=["folder", "folder with a key", *FAR])
def place(request, tmp_path):
    """A transport over objects, and functions that return groups and the keys of all objects."""
    address = request.getfixturevalue(request.param) if request.param in ("bucket", "hub") else tmp_path.as_uri()
    transport = transport_at(address, seal=Seal(bytes(range(32))) if "key" in request.param else None)

    def groups(size, name="group"):
        return [transport.connect(name, rank, size, Watch()) for rank in range(size)]

    transport.groups, transport.keys = groups, lambda: sorted(transport.board.list(""))
    return transport


def each(groups, function):
    """Call a function with each group, on a thread each."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(function, groups))


# ---- records


def race(address, key, variables, barrier, pipe):
    os.environ.update(variables)
    board = transport_at(address, seal=key and Seal(key)).board
    won = []
    for number in range(50):
        barrier.wait(60)
        won.append(board.put_new(f"log/{number}", b"%d" % os.getpid()))
    pipe.send(won)


def test_of_processes_that_create_a_record_at_once_one_does(place):
    context = fork_context()
    barrier, pipes, processes = context.Barrier(4), [], []
    key = place.board.seal and place.board.seal.key
    for _ in range(4):
        here, there = context.Pipe(duplex=False)
        processes.append(context.Process(target=race, args=(place.address, key, given_variables(), barrier, there)))
        pipes.append(here)
        processes[-1].start()
    won = [pipe.recv() for pipe in pipes]
    assert [sum(of_one) for of_one in zip(*won, strict=True)] == [1] * 50
    for number in range(50):
        (winner,) = [one.pid for one, mine in zip(processes, won, strict=True) if mine[number]]
        assert place.board.get(f"log/{number}") == b"%d" % winner
    for process in processes:
        process.join()


def test_a_record_that_this_writer_has_created_before_is_its_own(place):
    assert [place.board.put_new("key", value) for value in (b"mine", b"mine", b"other")] == [True, True, False]


def test_a_listing_of_many_pages_goes_on_where_a_request_has_failed(bucket, s3, monkeypatch):
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: None)
    board = transport_at(bucket).board
    keys = {f"part{number % 3}/{number}" for number in range(40)}
    for key in keys:
        board.put(key, b"1")
    s3.set(page=2, loses=3)  # more often than any patience allows, and some pages come each time
    found = board.patient(patience(1.0)).list("")
    s3.set()
    assert sorted(found) == sorted(keys)


@pytest.mark.parametrize("patience_s", [2.0, 8.0, 60.0, 600.0])
def test_a_request_gets_a_dozen_chances_however_short_its_patience(tmp_path, monkeypatch, patience_s):
    """Where a third of all requests fail by chance, one in half a million thus does."""
    at, clock = [], SimpleNamespace(now=0.0)
    monkeypatch.setattr(objects.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(objects.time, "sleep", lambda seconds: setattr(clock, "now", clock.now + seconds))

    def fails():
        at.append(clock.now)
        raise OSError("no")

    with pytest.raises(Unreachable):
        folder_at(tmp_path).patient(patience_s).ask(fails)
    assert len(at) >= 12 or patience_s < 2.4  # but no more than five in a second
    assert patience_s <= at[-1] <= patience_s + max(0.2, patience_s / 12)


# ---- groups


def values(rank, dtype):
    return (100 * torch.randn(37, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)).to(dtype)


def collectives(group):
    """The results of a few collectives, all under way at once."""
    size, found, works = group.size, [], []
    for dtype in DTYPES:
        out, sent = torch.empty(size * 37, dtype=dtype), values(group.rank, dtype)
        works += [group.all_gather(out, sent.clone()), group.broadcast(sent, size - 1)]
        found += [out, sent]
    total, nothing = values(group.rank, torch.float32), torch.empty(0)
    works += [group.all_reduce(total, "max"), group.all_gather(nothing, torch.empty(0))]
    turned, swapped = torch.empty(2 * size), torch.empty(3)
    works.append(group.all_to_all(turned, torch.arange(2.0 * size) + 100 * group.rank))
    right, left = (group.rank + 1) % size, (group.rank - 1) % size
    if size > 1:
        works.append(group.swap(swapped, torch.full((3,), float(group.rank)), right, left))
    for work in works:
        work.wait()
        work.wait()
    group.barrier()
    return [*found, total, turned, swapped if size > 1 else total, group.all_gather_small(torch.tensor([group.rank]))]


@pytest.mark.parametrize("hop_bytes", [0, ObjectGroup.hop_bytes])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_over_objects_have_the_exact_results(place, size, hop_bytes, monkeypatch):
    monkeypatch.setattr(ObjectGroup, "hop_bytes", hop_bytes)
    monkeypatch.setattr(FolderBoard, "lists_at_once", True)  # as of buckets
    for found, expected in zip(each(place.groups(size), collectives), run_replicas(collectives, size), strict=True):
        assert all(map(torch.equal, found, expected))


CODECS = [TopK(k=16, chunk=16, bits=32), Int4(8)]


def means(group):
    weights, ways = (1.0, 2.0, 0.5)[: group.size], [*product([GatherMean()], CODECS), (ReduceScatterMean(), Int4(8))]
    return [aggregated(group, way, codec, 300, weights) for way, codec in ways]


@pytest.mark.law("same-bits")
def test_a_mean_over_objects_has_the_bits_of_one_over_gloo(place):
    over_gloo = run_ranks(of_world, 3)
    for found in each(place.groups(3), means):
        assert all(map(torch.equal, found, over_gloo[0]))


def of_world():
    return means(TorchGroup())


@pytest.mark.parametrize("size", [4, 8, 32])
def test_a_sum_of_many_values_reads_two_payloads_whatever_the_number_of_ranks(size, tmp_path, monkeypatch):
    count, came, went = 300_000, [], []
    read, write = FolderBoard.read_name, FolderBoard.write_name

    def read_name(board, name, act, *span):
        def taken(file, num_bytes):
            came.append(num_bytes)
            return act(file, num_bytes)

        return read(board, name, taken, *span)

    def write_name(board, name, parts, is_new):
        went.append(sum(memoryview(part).nbytes for part in parts))
        write(board, name, parts, is_new)

    def summed(group):
        x = torch.arange(float(count)) % 1000 * (group.rank + 1)
        group.all_reduce(x).wait()
        return x

    monkeypatch.setattr(FolderBoard, "read_name", read_name)
    monkeypatch.setattr(FolderBoard, "write_name", write_name)
    transport = transport_at(tmp_path.as_uri())
    for found in each([transport.connect("group", rank, size, Watch()) for rank in range(size)], summed):
        assert torch.equal(found, torch.arange(float(count)) % 1000 * (size * (size + 1) // 2))
    assert sum(came) / size <= 2 * 4 * count
    assert sum(went) / size <= 1.1 * 4 * count


@pytest.mark.parametrize("size", [4, 8, 32])
def test_values_of_many_ranks_that_lie_in_names_are_one_request_to_read(place, size, monkeypatch):
    monkeypatch.setattr(FolderBoard, "lists_at_once", True)
    kind, asked = type(place.board), []

    def counted(request, act):
        def count(board, *arguments, **options):
            asked.append(request)
            return act(board, *arguments, **options)

        monkeypatch.setattr(kind, request, count)

    for request in ("find_names", "read_name", "write_name"):
        counted(request, getattr(kind, request))
    groups = place.groups(size)
    outs, mine = torch.empty(size, size, 14).double(), (torch.arange(size)[:, None] + 0.1).double().expand(size, 14)
    works = [group.all_gather(outs[group.rank], mine[group.rank]) for group in groups]
    until(lambda: asked.count("write_name") == size and all(work.written.is_over for work in works))
    asked.clear()
    for work, out in zip(works, outs, strict=True):
        work.wait()
        assert torch.equal(out, mine)
    assert asked == ["find_names"] * size


def test_a_name_that_is_not_of_a_rank_is_no_value(place, monkeypatch):
    monkeypatch.setattr(FolderBoard, "lists_at_once", True)
    groups = place.groups(4)
    for name in ("1/x/AAAA", "1/9/AAAA", "1/-1/AAAA", "2/1", "1/1e400/AAAA", "1/³/AAAA"):
        place.board.put(f"group/{name}", b"?")
    found = each(groups, lambda group: group.all_gather_small(torch.tensor([group.rank])))
    assert [one.tolist() for one in found] == [[[0], [1], [2], [3]]] * 4


def test_a_value_in_a_name_opens_with_the_key_alone_and_in_its_own_place(place):
    board = place.board
    key = board.key_with("1/3", b"secret")
    board.put(key, b"1")
    if board.seal is not None:
        assert "c2VjcmV0" not in key
        board.put(key.replace("1/3", "1/4"), b"1")
    assert [(name, file.read(), size) for name, file, size in board.values_below("1")] == [("3", b"secret", 6)]


def test_a_part_opens_in_its_own_place_alone(place):
    board, texts = place.board, [b"one", b"two"]
    board.write_several("key", [[text] for text in texts])
    assert [board.read_one("key", k, 3, lambda file, size: file.read(size)) for k in range(2)] == texts
    assert board.read_one("missing", 0, 3, lambda file, size: file.read(size)) is None
    name = board.name("key")
    content = board.read_name(name, lambda file, size: file.read())
    half = len(content) // 2
    board.write_name(name, [content[half:], content[:half]], is_new=False)
    if board.seal is not None:
        with pytest.raises(SealError, match="it was not sealed under this name"):
            board.read_one("key", 0, 3, lambda file, size: file.read(size))


def test_a_damaged_part_names_its_author_to_the_one_that_reads_it(tmp_path):
    transport = transport_at(tmp_path.as_uri())
    first, second, third = (transport.connect("group", rank, 3, Watch()) for rank in range(3))
    x, out = torch.arange(6.0), torch.empty(6)
    works = [group.all_to_all(out.clone(), x) for group in (second, third)]
    name = transport.board.name("group/1.1")
    content = until(lambda: transport.board.read_name(name, lambda file, size: file.read()))
    transport.board.write_name(name, [damaged(content)], is_new=False)  # the last byte is for the last rank
    work = first.all_to_all(out, x)
    work.wait()
    assert out.tolist() == [0, 1] * 3
    with pytest.raises(RankFailure, match="rank 1 has written a share that can't be used: its checksum"):
        works[1].wait()


def test_a_rank_may_be_many_collectives_ahead_of_one_that_reads_and_none_loses_a_value(place):
    def pieces(group):
        for number in range(100):
            x = torch.full((3,), float(number if group.rank == 0 else -1))
            group.broadcast(x, 0).wait()
            assert x.tolist() == [number] * 3
        group.free()

    each(place.groups(3), pieces)
    assert place.keys() == []


def test_a_note_of_what_was_read_that_could_not_be_written_is_written_again(tmp_path, monkeypatch):
    write, refused = FolderBoard.write_name, []

    def fails(board, name, parts, is_new):
        if "read.1" in unquote(name) and len(refused) < 2:
            refused.append(name)
            raise Unreachable("no more disk")
        return write(board, name, parts, is_new)

    monkeypatch.setattr(FolderBoard, "write_name", fails)
    transport = transport_at(tmp_path.as_uri())

    def pieces(group):
        for _ in range(40):
            group.broadcast(torch.ones(3), 0).wait()
        group.free()

    each([transport.connect("group", rank, 2, Watch()) for rank in range(2)], pieces)
    assert len(refused) == 2


@pytest.mark.long
def test_objects_are_few_after_many_collectives_and_none_once_all_are_done(place):
    counts = []

    def rounds(group):
        beside = group.duplicate()
        for number in range(300):
            group.all_gather_small(torch.tensor([number]))
            if number % 3 == 0:
                beside.broadcast(torch.zeros(2), number % 2).wait()
            if group.rank == 0:
                counts.append(len(place.keys()))
        beside.free()
        group.free()

    each(place.groups(2), rounds)
    assert max(counts) <= 30
    assert place.keys() == []


def test_one_that_leaves_ends_the_waits_of_others_and_what_it_has_written_before_is_read(place):
    first, second = place.groups(2)
    second.all_gather(torch.empty(2), torch.ones(1))
    second.leave("no more disk")
    assert second._watch.reasons == ["no more disk"]
    out = torch.empty(2)
    first.all_gather(out, torch.zeros(1)).wait()
    assert out.tolist() == [0, 1]
    with pytest.raises(RankFailure, match=r"rank 1 has left \(no more disk\)"):
        first.all_gather(out, torch.zeros(1)).wait()


def test_a_rank_that_can_not_write_its_share_ends_the_generation_and_says_why(tmp_path):
    group = transport_at(tmp_path.as_uri(), patience_s=0).connect("group", 0, 2, Watch())
    tmp_path.rename(tmp_path.with_suffix(".away"))
    with pytest.raises(RankFailure, match=f"The run's folder {tmp_path} can't be used: No such file"):
        group.all_gather(torch.empty(2), torch.ones(1)).wait()
    assert ["No such file" in reason for reason in group._watch.reasons] == [True]
    group.raise_if_broken()
    assert group._watch.looks == [("", 0, (), False)]


def damaged(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def header_of(content, **changed):
    line, _, plain = content.partition(b"\n")
    checksum, _, header = line.partition(b" ")
    return checksum + b" " + json.dumps(json.loads(header) | changed).encode() + b"\n" + plain


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damaged, "its checksum shows that it is damaged"),
        (lambda content: content[:-3], "in .* bytes instead of"),
        (lambda content: content + b"x", "in .* bytes instead of"),
        (lambda content: header_of(content, numel=10**15), r"'numel': 10+} instead of"),
        (lambda content: header_of(content, dtype="torch.int32"), "torch.int32.* instead of .*torch.float32"),
        (lambda content: header_of(content, read=2), "its checksum shows that it is damaged"),
        (lambda content: header_of(content, read="x"), "instead of"),
        (lambda content: b"", "it has no header"),
        (lambda content: b"[" * 3000, "it has no header"),
        (lambda content: b"x [1]\n", r"\[1\] instead of"),
    ],
    ids=["bit", "short", "long", "numel", "dtype", "read", "words", "empty", "deep", "list"],
)
def test_a_share_that_is_not_what_its_author_had_to_write_names_it_for_all(place, change, why):
    first, second, third = place.groups(3)
    second.all_gather(torch.empty(15), torch.ones(5))
    (key,) = until(place.keys)
    place.board.put(key, change(place.board.get(key)))
    why = f"rank 1 has written a share that can't be used: .*{why}"
    with pytest.raises(RankFailure, match=why):
        first.all_gather(torch.empty(15), torch.zeros(5)).wait()
    place.board.delete(key)
    assert first._watch.authors == [1]
    with pytest.raises(RankFailure, match=why):
        third.all_gather(torch.empty(15), torch.zeros(5)).wait()


def test_an_object_has_a_checksum_whatever_strides_its_tensors_have_and_a_header_of_limited_length():
    strided = torch.arange(5.0).repeat_interleave(2)[::2].requires_grad_()
    written = b"".join(packed([5], [strided]))
    assert written.partition(b" ")[0] == b"%08x" % zlib.crc32(b"[5]" + torch.arange(5.0).numpy().tobytes())
    with pytest.raises(Damaged, match="it has no header"):  # of so few bytes
        unpack(BufferedReader(BytesIO(written)), len(written), 10, lambda _: [torch.empty(5)])


def test_foreign_objects_change_nothing(place):
    groups = place.groups(2)
    each(groups, collectives)
    for name in ("1.7", "999.1", "read.5", "read.1", ".DS_Store"):
        place.board.put(f"group/{name}", b"?")
    assert [found[-1].tolist() for found in each(groups, collectives)] == [[[0], [1]]] * 2


def test_a_wait_asks_its_watch(place):
    first, second = place.groups(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.barrier)
        until(lambda: first._watch.looks)
        second.barrier()
        waiting.result(60)
    assert set(first._watch.looks) == {("group#1", 8, (1,), True)}
    assert set(first._watch.ends) == {("group#1", 8, (), True)}


def test_a_look_ends_at_the_first_share_that_is_late(tmp_path, monkeypatch):
    size, log = 8, []
    first, *others = [transport_at(tmp_path.as_uri()).connect("group", rank, size, Watch()) for rank in range(size)]
    read, sleep = FolderBoard.read_name, time.sleep

    def read_name(board, name, act, *span):
        found = read(board, name, act, *span)
        if threading.current_thread().name.startswith("waits"):
            log.append((name, found))
        return found

    def pause(seconds):
        if threading.current_thread().name.startswith("waits"):
            log.append(("pause", None))
        sleep(seconds)

    monkeypatch.setattr(FolderBoard, "read_name", read_name)
    monkeypatch.setattr(time, "sleep", pause)
    with ThreadPoolExecutor(1, "waits") as threads:
        waiting = threads.submit(first.all_gather_small, torch.tensor([0.0]))
        until(lambda: first._watch.looks)
        for group in reversed(others):
            group.all_gather(torch.empty(size, 1), torch.tensor([float(group.rank)]))
        assert waiting.result(patience(60)).flatten().tolist() == [*range(size)]
    shares = [one for one in log if not one[0].endswith("left")]
    assert {name for name, found in shares if found} == {f"group/1%2E{rank}" for rank in range(1, size)}
    assert not [one for one in pairwise(shares) if one[0][1] is None and one[1][1] is None and "pause" not in dict(one)]


def test_shares_are_read_at_the_same_time_where_each_takes_long(tmp_path, monkeypatch):
    size, under_way, most = 6, [], []
    first, *others = [transport_at(tmp_path.as_uri()).connect("group", rank, size, Watch()) for rank in range(size)]
    read = FolderBoard.read_name

    def read_name(board, name, act, *span):
        under_way.append(name)
        most.append(len(under_way))
        time.sleep(0.02)
        found = read(board, name, act, *span)
        under_way.remove(name)
        return found

    for group in others:
        for number in range(2):
            group.all_gather(torch.empty(size, 1), torch.tensor([float(number)]))
    monkeypatch.setattr(FolderBoard, "read_name", read_name)
    for number, are_at_once in enumerate((False, True)):
        most.clear()
        assert first.all_gather_small(torch.tensor([float(number)])).flatten().tolist() == [number] * size
        assert (max(most) > 1) == are_at_once


@pytest.mark.gpu
def test_tensors_of_a_gpu_travel_through_the_hosts_memory(place):
    def exchanged(group):
        out, x = (torch.empty(n, device="cuda") for n in (6, 3))
        group.all_gather(out, x.fill_(group.rank)).wait()
        group.broadcast(x, 1).wait()
        return out.tolist(), x.tolist()

    assert each(place.groups(2), exchanged) == [([0.0] * 3 + [1.0] * 3, [1.0] * 3)] * 2
