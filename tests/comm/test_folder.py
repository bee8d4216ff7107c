# SPDX-License-Identifier: Apache-2.0
"""A folder as a board and as a way to meet: who creates a file first, what ends a wait, and that nothing grows."""

import json
import multiprocessing as mp
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from farflung.base.errors import ConfigError, RankFailure, Unreachable, Unsupported
from farflung.comm.folder import FolderTransport
from farflung.outer import GatherMean, Int4, TopK
from farflung.testing.ranks import run_ranks
from tests.outer.test_aggregate import aggregated

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64]


class Watch:
    """Looks at nothing; what ends the generation is kept."""

    connect_s = 5.0

    def __init__(self):
        self.reasons, self.looks = [], 0

    def look(self, entered, waited_s):
        self.looks += 1

    def note_end(self, entered, waited_s):
        return None

    def break_off(self, reason):
        self.reasons.append(reason)
        return RankFailure(reason)


@pytest.fixture
def folder(tmp_path):
    """A folder, and a function that returns its files."""
    transport = FolderTransport(tmp_path)

    def groups(size, name="group"):
        return [transport.connect(name, rank, size, Watch()) for rank in range(size)]

    def files():
        return sorted(path for path in tmp_path.rglob("*") if path.is_file())

    transport.groups, transport.files = groups, files
    return transport


def each(groups, function):
    """Call a function with each group, on a thread each."""
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(function, groups))


# ---- records


def race(path, barrier, pipe):
    board = FolderTransport(path).board
    won = []
    for number in range(50):
        barrier.wait(60)
        won.append(board.put_new(f"log/{number}", b"%d" % os.getpid()))
    pipe.send(won)


def test_of_processes_that_create_a_record_at_once_one_does(tmp_path):
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["farflung.testing.preload"])
    barrier, pipes, processes = context.Barrier(4), [], []
    for _ in range(4):
        here, there = context.Pipe(duplex=False)
        processes.append(context.Process(target=race, args=(tmp_path, barrier, there)))
        pipes.append(here)
        processes[-1].start()
    won = [pipe.recv() for pipe in pipes]
    assert [sum(of_one) for of_one in zip(*won, strict=True)] == [1] * 50
    board = FolderTransport(tmp_path).board
    for number in range(50):
        (winner,) = [one.pid for one, mine in zip(processes, won, strict=True) if mine[number]]
        assert board.get(f"log/{number}") == b"%d" % winner
    for process in processes:
        process.join()


def test_a_record_that_this_writer_has_created_before_is_its_own(folder):
    assert [folder.board.put_new("key", value) for value in (b"mine", b"mine", b"other")] == [True, True, False]


@pytest.mark.parametrize("key", ["../../etc/x", ".", "..", "a/../b", "a b:c%2E/ü", ".aside/x", "x.value"])
def test_no_key_leaves_the_folder_or_is_taken_for_another_one(folder, tmp_path, key):
    folder.board.put("a/b", b"another")
    folder.board.put(key, b"1")
    assert folder.board.get(key) == b"1"
    assert [one for one in folder.board.list("") if one != "a/b"] == [key]
    assert folder.board.get("a/b") == b"another"
    assert len(folder.files()) == 2
    folder.board.delete(key)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".aside"] == ["a"]


def test_a_key_may_be_the_beginning_of_others_and_foreign_files_are_none(folder, tmp_path):
    folder.board.put("log", b"1")
    folder.board.put("log/1", b"2")
    (tmp_path / "log" / ".nfs0001").write_bytes(b"?")
    (tmp_path / "log" / "no quoted name.value").write_bytes(b"?")
    assert sorted(folder.board.list("")) == ["log", "log/1"]
    assert (folder.board.get("log"), list(folder.board.list("log/"))) == (b"1", ["log/1"])


def test_a_folder_that_is_gone_ends_requests_with_its_name_and_one_that_comes_back_does_not(folder, tmp_path):
    folder.board.put("key", b"1")
    away = tmp_path.with_name("away")
    tmp_path.rename(away)
    board = folder.board.patient(0)
    requests = [
        lambda: board.get("key"),
        lambda: board.has(["key"]),
        lambda: board.list(""),
        lambda: board.put("key", b"2"),
        lambda: board.put_new("new", b"2"),
    ]
    for request in requests:
        with pytest.raises(Unreachable, match=f"The run's folder {tmp_path} can't be used: No such file"):
            request()
    assert not tmp_path.exists()
    back = threading.Timer(0.3, lambda: away.rename(tmp_path))
    back.start()
    assert folder.board.get("key") == b"1"
    back.join()


@pytest.mark.parametrize("what", ["missing", "a file"])
def test_a_place_where_nobody_can_meet_is_refused_before_anything_begins(tmp_path, what):
    path = tmp_path / "x"
    if what == "a file":
        path.touch()
    with pytest.raises(ConfigError, match=f"can't meet in the folder {path}: (No such|Not a dir)"):
        FolderTransport(path)


def test_what_a_killed_writer_has_left_is_deleted_after_a_day(folder, tmp_path):
    old, new = (tmp_path / ".aside" / name for name in ("old", "new"))
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    FolderTransport(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


# ---- groups


def values(rank, dtype, numel=37):
    made = torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (100 * made).to(dtype)


def collectives(group):
    """The results of a few collectives, all under way at once."""
    size, found, works = group.size, [], []
    for dtype in DTYPES:
        out = torch.empty(size * 37, dtype=dtype)
        works.append(group.all_gather(out, values(group.rank, dtype)))
        sent = values(group.rank, dtype)
        works.append(group.broadcast(sent, size - 1))
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


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_collectives_of_a_folder_have_the_exact_results(folder, size):
    for rank, found in enumerate(each(folder.groups(size), collectives)):
        expected = []
        for dtype in DTYPES:
            expected += [torch.cat([values(one, dtype) for one in range(size)]), values(size - 1, dtype)]
        top = torch.stack([values(one, torch.float32) for one in range(size)]).amax(0)
        turned = [100.0 * one + 2 * rank + half for one in range(size) for half in range(2)]
        swapped = torch.full((3,), float((rank - 1) % size)) if size > 1 else top
        expected += [top, torch.tensor(turned), swapped, torch.arange(size).view(size, 1)]
        assert all(map(torch.equal, found, expected))


CODECS = [TopK(k=16, chunk=16, bits=32), Int4(8)]


def means(group):
    return [aggregated(group, GatherMean(), codec, 300, (1.0, 2.0, 0.5)[: group.size]) for codec in CODECS]


@pytest.mark.ranks
@pytest.mark.law("same-bits")
def test_a_mean_over_a_folder_has_the_bits_of_one_over_gloo(folder):
    over_gloo = run_ranks(of_world, 3)
    for found in each(folder.groups(3), means):
        assert all(map(torch.equal, found, over_gloo[0]))


def of_world():
    from farflung.comm.torch_group import TorchGroup

    return means(TorchGroup())


def test_a_rank_may_be_many_collectives_ahead_of_one_that_reads_and_none_loses_a_value(folder):
    def pieces(group):
        found = []
        for number in range(100):
            x = torch.full((3,), float(number if group.rank == 0 else -1))
            group.broadcast(x, 0).wait()
            found.append(x[0].item())
        group.free()
        return found

    assert each(folder.groups(3), pieces) == [[float(number) for number in range(100)]] * 3
    assert folder.files() == []


def test_files_are_few_after_many_collectives_and_none_once_all_are_done(folder):
    counts = []

    def rounds(group):
        beside = group.duplicate()
        for number in range(300):
            group.all_gather_small(torch.tensor([number]))
            if number % 3 == 0:
                beside.broadcast(torch.zeros(2), number % 2).wait()
            if group.rank == 0:
                counts.append(len(folder.files()))
        beside.free()
        group.free()

    each(folder.groups(2), rounds)
    assert max(counts) == max(counts[:100]) <= 30
    assert folder.files() == []


def test_one_that_leaves_ends_the_waits_of_others_and_what_it_has_written_before_is_read(folder):
    first, second = folder.groups(2)
    work = second.all_gather(torch.empty(2), torch.ones(1))
    del work
    second.leave("no more disk")
    assert second._watch.reasons == ["no more disk"]
    out = torch.empty(2)
    first.all_gather(out, torch.zeros(1)).wait()
    assert out.tolist() == [0, 1]
    with pytest.raises(RankFailure, match=r"rank 1 has left \(no more disk\)"):
        first.all_gather(out, torch.zeros(1)).wait()


def damaged(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def header_of(content, **changed):
    line, _, plain = content.partition(b"\n")
    digest, _, header = line.partition(b" ")
    return digest + b" " + json.dumps(json.loads(header) | changed).encode() + b"\n" + plain


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (damaged, "the share of rank 1 is damaged, as its digest shows"),
        (lambda content: content[:-3], "rank 1 has written another share than rank 0 waits for"),
        (lambda content: content + b"x", "rank 1 has written another share than rank 0 waits for"),
        (lambda content: header_of(content, numel=10**15), "rank 1 has written another share"),
        (lambda content: header_of(content, dtype="torch.int32"), "rank 1 has written another share"),
        (lambda content: header_of(content, read=2), "the share of rank 1 is damaged"),
        (lambda content: b"", "rank 1 has written a share without a header"),
        (lambda content: b"[" * 3000, "rank 1 has written a share without a header"),
        (lambda content: b"x [1]\n", "rank 1 has written a share without a header"),
    ],
    ids=["bit", "short", "long", "numel", "dtype", "read", "empty", "deep", "list"],
)
def test_a_share_that_is_not_what_its_author_had_to_write_names_it_for_all(folder, change, why):
    first, second, third = folder.groups(3)
    second.all_gather(torch.empty(15), torch.ones(5))
    (path,) = folder.files()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RankFailure, match=why):
        first.all_gather(torch.empty(15), torch.zeros(5)).wait()
    path.unlink()
    with pytest.raises(RankFailure, match=why):
        third.all_gather(torch.empty(15), torch.zeros(5)).wait()


def test_foreign_files_change_nothing(folder, tmp_path):
    groups = folder.groups(2)
    each(groups, collectives)
    for name in ("1.7.value", "left", "999.1.value", "read.5.value", ".DS_Store"):
        (tmp_path / "group" / name).write_bytes(b"?")
    (tmp_path / "group" / "read%2E1.value").write_bytes(b"?")
    assert [found[-1].tolist() for found in each(groups, collectives)] == [[[0], [1]]] * 2


def test_a_wait_asks_its_watch(folder):
    first, second = folder.groups(2)
    done = threading.Event()
    first._watch.look = lambda entered, waited_s: done.set()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first.barrier)
        assert done.wait(60)
        second.barrier()
        waiting.result(60)


def test_a_tensor_that_is_not_in_the_hosts_memory_is_refused_by_name(tmp_path):
    group = FolderTransport(tmp_path).connect("g1", 0, 2, Watch())
    elsewhere = torch.ones(2, device="meta")  # as one on a GPU
    for exchange in (lambda: group.broadcast(elsewhere, 0), lambda: group.all_gather(elsewhere, elsewhere)):
        with pytest.raises(Unsupported, match="A tensor on meta can't be written to a folder"):
            exchange()
