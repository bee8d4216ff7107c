# SPDX-License-Identifier: Apache-2.0
"""Who reads the weights of a run at its address: whole or by differences, with equal bits, whatever happens."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import nn

from farflung.address import reader
from farflung.address.difference import ReferenceWeights
from farflung.address.folder import FolderBoard
from farflung.address.member_store import LauncherNotes
from farflung.address.packed import Damaged
from farflung.address.reader import Reader
from farflung.address.saved_state import SavedStates
from farflung.address.schemes import transport_at
from farflung.address.seal import Seal
from farflung.base.errors import ConfigError, Unreachable
from farflung.members import differences
from farflung.members.elastic import Elastic
from farflung.outer import OuterLoop, diloco, local_sgd, streaming_diloco
from farflung.testing.patience import patience
from farflung.testing.ranks import run_ranks
from tests.outer.replicas import same, values
from tests.outer.test_saved_state import RECIPE, in_shards, kill, pulled, step, trained
from tests.python import call_farflung
from tests.waits import until

KEY = bytes(32)


def network():
    """A model with parameters of two dtypes, running means and a count of batches."""
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 33).bfloat16())


def whole(address, dtype, key=None):
    """The newest weights, read whole."""
    found = Reader(address, key).newest().weights
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in found.items()}


def followed(outer, versions, count, address, dtype, key=None):
    """Train, and read each version; return how many bytes each took, as its bits are those of the whole weights."""
    sizes = []
    for _ in range(count):
        step(outer, 4)
        version = next(versions)
        assert same(version.weights, whole(address, dtype, key))
        sizes.append(version.num_bytes)
    return sizes


def board_of(address):
    return transport_at(address).board.part("loop1")


@pytest.mark.law("readout-is-slow-weights")
@pytest.mark.parametrize(
    "recipe",
    [diloco(4), diloco(4, average=3), local_sgd(4), streaming_diloco(4, 2, delay=1)],
    ids=["diloco", "average", "local_sgd", "streaming"],
)
def test_the_weights_of_a_run_can_be_pulled_while_it_trains_and_when_it_has_ended(tmp_path, recipe):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    address = tmp_path.as_uri()
    outer, _ = trained(address, recipe, 9, model)
    kinds = {name: (x.shape, x.dtype) for name, x in model.state_dict().items()}
    assert {name: (x.shape, x.dtype) for name, x in pulled(address, tmp_path).items()} == kinds
    if recipe.leaves_alike and recipe.has_anchor:
        with outer.synced():
            assert same(pulled(address, tmp_path), values(model))
    outer.close()
    assert same(pulled(address, tmp_path), model.state_dict())


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_who_follows_a_run_has_each_newer_version_whole_until_that_of_its_end(tmp_path, dtype):
    address, found, refused, model = tmp_path.as_uri(), [], [], nn.Linear(3, 2)
    outer, _ = trained(address, RECIPE, 9, model)
    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(lambda: found.extend(iter(Reader(address, refused=refused.append, dtype=dtype))))
        until(lambda: found)
        assert same(found[0].weights, pulled(address, tmp_path))
        board = transport_at(address).board.part("loop1")
        step(outer, 8)
        newest = next(SavedStates(board).newest())
        until(lambda: found[-1].step == newest.position)
        key = f"state/{newest.name}/0/0"
        board.put(key, board.get(key)[:-1] + b"?")  # as it was taken before, nobody asks for it again
        outer.close()
        following.result(60)
    steps = [version.step for version in found]
    assert (steps, refused) == (sorted(set(steps)), [])
    assert [version.is_last for version in found] == [False] * (len(found) - 1) + [True]
    assert same(found[-1].weights, model.state_dict())
    assert [version.step for version in Reader(address)] == steps[-1:]  # of a run that is over


def test_states_of_a_first_member_that_waits_for_others_to_end_are_followed_and_deleted(tmp_path):
    """Its own place in the schedule is the same in all of them."""
    address, found = tmp_path.as_uri(), []
    members = [LauncherNotes(transport_at(address).board).enroll("replica") for _ in range(2)]

    def train(member, goes_on):
        membership = Elastic(transport_at(address), member, expected=2, grace_s=patience(60.0), state_every=2)
        outer, rounds = OuterLoop(nn.Linear(3, 2), diloco(4), membership=membership), 0
        while rounds < 1 or (goes_on() and rounds < 300):
            step(outer, 4)
            rounds += 1
        outer.close()
        return rounds

    with ThreadPoolExecutor(3) as threads:
        waiting = threads.submit(train, members[0], lambda: False)
        training = threads.submit(train, members[1], lambda: len(found) < 5)
        threads.submit(lambda: found.extend(iter(Reader(address)))).result(patience(120.0))
    assert waiting.result() == 1 < training.result() < 300
    assert len({version.step for version in found[:5]}) < 4
    assert [version.is_last for version in found] == [False] * (len(found) - 1) + [True]
    board = board_of(address)
    assert {key.split("/")[1] for key in board.list("state/")} == {one.name for one in SavedStates(board).newest()}


def test_who_follows_before_the_run_begins_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_LOOK_S", 0.01)
    looked, address = threading.Event(), tmp_path.as_uri()
    find = reader.part_of_run

    def part_of_run(board, address):
        found = find(board, address)
        looked.set()
        return found

    monkeypatch.setattr(reader, "part_of_run", part_of_run)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(lambda: next(iter(Reader(address))))
        assert looked.wait(patience(20.0))
        run = transport_at(address).of_run(b"{}")
        outer, _ = trained(run, RECIPE, 5, network())
        assert same(first.result(patience(20.0)).weights, Reader(address).newest().weights)
        outer.close()


def test_a_state_that_is_replaced_while_it_is_read_is_no_damage(tmp_path, monkeypatch):
    outer, _ = trained(tmp_path.as_uri(), RECIPE, 5, network())
    read, calls = reader._VersionReader.whole, []

    def slowly(self, saved):
        calls.append(saved.position)
        if len(calls) == 1:
            step(outer, 12)  # three states, of which two stay
        return read(self, saved)

    monkeypatch.setattr(reader._VersionReader, "whole", slowly)
    assert Reader(tmp_path.as_uri()).newest().step == calls[-1] > calls[0]
    outer.close()


def test_a_file_that_can_not_be_written_is_an_error_that_names_it_and_known_before_anything_is_read(tmp_path, capsys):
    version = reader.Version(3, {"x": torch.ones(2)}, False, 8)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"after step 3 can't be written to .*file/x"):
        version.save(tmp_path / "file" / "x")
    for target in ("nowhere/x.safetensors", "nowhere/"):
        assert call_farflung("checkpoint", "pull", tmp_path.as_uri(), f"{tmp_path}/{target}") == 2
        assert "is no folder that can be written to" in capsys.readouterr().err


def test_a_version_that_is_damaged_is_said_and_left_out(tmp_path, capsys):
    address, refused = tmp_path.as_uri(), []
    outer, _ = trained(address, RECIPE, 9)
    outer.close()
    board = transport_at(address).board.part("loop1")
    newest, before = SavedStates(board).newest()
    board.put(f"state/{newest.name}/0/0", b"?")
    sentence = f"The state at step {newest.position} was not taken: it has no header"
    assert [version.step for version in Reader(address, refused=refused.append)] == [before.position]
    assert refused == [sentence]
    call_farflung("checkpoint", "pull", address, tmp_path / "x.safetensors", "--follow")
    whole = f"{tmp_path / 'x.safetensors'} has 2 tensors after step {before.position}"
    assert capsys.readouterr().out.splitlines() == [sentence, whole]
    call_farflung("checkpoint", "pull", address, tmp_path / "x.safetensors", "--dtype", "bfloat16")
    assert {x.dtype for x in load_file(tmp_path / "x.safetensors").values()} == {torch.bfloat16}


@pytest.mark.law("readout-is-slow-weights")
def test_a_run_goes_on_from_the_anchor_whatever_is_pulled(tmp_path):
    outer, member = trained(tmp_path.as_uri(), diloco(4), 8, model := nn.Linear(3, 2))
    anchor = values(model)
    assert not same(pulled(tmp_path.as_uri(), tmp_path), anchor)
    kill(outer, member, tmp_path.as_uri())
    trained(tmp_path.as_uri(), diloco(4), 0, again := nn.Linear(3, 2))
    assert same(values(again), anchor)


KINDS = torch.bfloat16, torch.float16, torch.float32


@given(
    st.sampled_from(KINDS),
    st.lists(st.tuples(st.sampled_from([*KINDS, torch.int64, torch.bool]), st.integers(0, 70)), max_size=5),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.randoms(use_true_random=False),
)
def test_a_difference_leads_to_the_bits_of_the_next_weights_whatever_they_are(dtype, kinds, share, random):
    """Also to those of infinities, of NaNs with any bits, and of what isn't as wide as the others."""

    def bits(width):
        return torch.tensor([random.getrandbits(8) for _ in range(width)], dtype=torch.uint8)

    pairs, after = [], []
    for number, (kind, size) in enumerate(kinds):
        kind = dtype if kind.is_floating_point else kind
        old = bits(size * kind.itemsize) & (1 if kind == torch.bool else 255)
        new = torch.where(torch.tensor([random.random() < share for _ in old], dtype=torch.bool), old ^ 1, old)
        row = (f"{number}", str(kind).removeprefix("torch."), [size], [0], [size])
        for into, plain in ((pairs, old), (after, new)):
            into.append((row, plain.view(kind)))
    writer, reader, late = (ReferenceWeights.of("1.1", dtype, pairs) for _ in range(3))
    difference = writer.advance("1.2", after)
    reader.apply("1.2", difference)
    for (_, one), (_, other), (_, held) in zip(reader.pairs(), after, writer.pairs(), strict=True):
        assert one.dtype == other.dtype
        assert one.view(torch.uint8).tolist() == other.view(torch.uint8).tolist() == held.view(torch.uint8).tolist()
    late.name = "1.0"
    with pytest.raises(Damaged, match=r"it is one to the state 1\.1, and not to 1\.0"):
        late.apply("1.2", difference)
    assert writer.advance("1.3", [*after, (("more", "float32", [1], [0], [1]), torch.ones(1))]) is None


@pytest.mark.parametrize("dtype", KINDS[::2])
@pytest.mark.parametrize("key", [None, KEY], ids=["open", "sealed"])
@pytest.mark.parametrize("place", ["folder", *(pytest.param(one, marks=pytest.mark.long) for one in ("bucket", "hub"))])
def test_who_reads_each_version_reads_what_changes_and_has_equal_bits(tmp_path, request, place, dtype, key):
    address, said = tmp_path.as_uri() if place == "folder" else request.getfixturevalue(place), []
    outer, _ = trained(transport_at(address, seal=key and Seal(key)), RECIPE, 5, network())
    versions = iter(Reader(address, key, said.append, dtype=dtype))
    sizes = followed(outer, versions, 8, address, dtype, key)
    assert max(sizes[3:]) * 5 < min(sizes[:3])
    step(outer, 12)  # three versions that this reader doesn't ask for
    assert followed(outer, versions, 1, address, dtype, key)[0] < sizes[0]
    outer.close()
    last = list(versions)[-1]
    assert last.is_last
    assert same(last.weights, whole(address, dtype, key))
    assert said == []


def test_a_run_that_nobody_reads_by_differences_writes_none(tmp_path):
    address = tmp_path.as_uri()
    outer, _ = trained(address, RECIPE, 5, network())
    versions = iter(Reader(address))
    for _ in range(5):
        step(outer, 4)
        next(versions)
    there = board_of(address).list("")
    assert {key.rpartition("/")[2] for key in there if key.startswith("state/")} == {"place", "0", "done"}
    assert not [key for key in there if key.startswith("readers/")]
    assert outer._quorum.membership.saver._differences._held == {}
    outer.close()


def test_differences_end_once_no_reader_keeps_up(tmp_path, monkeypatch):
    monkeypatch.setattr(differences, "_MOST", 3)
    address = tmp_path.as_uri()
    outer, _ = trained(address, RECIPE, 5, network())
    versions = iter(Reader(address, dtype=torch.bfloat16, refused=(said := []).append))
    followed(outer, versions, 4, address, torch.bfloat16)
    step(outer, 4 * 6)
    there = board_of(address).list("")
    assert not [key for key in there if key.startswith("readers/") or key.endswith("bfloat16")]
    assert outer._quorum.membership.saver._differences._held == {}
    sizes = followed(outer, versions, 5, address, torch.bfloat16)
    outer.close()
    assert sizes[-1] * 5 < sizes[0]
    (sentence,) = said
    assert "is read whole, as there are no differences to it" in sentence


def test_a_reader_that_may_not_write_reads_whole_versions_and_says_so_once(tmp_path, monkeypatch):
    def refuses(*_):
        raise Unreachable("The run's bucket can't be used: 403.")

    address, said = tmp_path.as_uri(), []
    outer, _ = trained(address, RECIPE, 5, network())
    versions = iter(Reader(address, refused=said.append, dtype=torch.bfloat16))
    with monkeypatch.context() as patch:
        patch.setattr(SavedStates, "note_reader", refuses)
        assert len(set(followed(outer, versions, 5, address, torch.bfloat16))) == 1
    outer.close()
    why = "Versions are read whole, as no note that asks for differences can be left"
    assert said == [f"{why}: The run's bucket can't be used: 403."]
    with pytest.raises(ConfigError, match=r"dtype is torch.int8. Give torch.bfloat16, torch.float16, torch.float32"):
        Reader(address, dtype=torch.int8)


@pytest.mark.parametrize("harm", ["bit", "short", "missing", "another", "form", "stream"])
@pytest.mark.parametrize("dtype", KINDS[::2])
def test_a_difference_that_is_damaged_is_said_and_the_version_is_read_whole(tmp_path, harm, dtype):
    address, said = tmp_path.as_uri(), []
    outer, _ = trained(address, RECIPE, 5, network())
    versions, part = iter(Reader(address, refused=said.append, dtype=dtype)), str(dtype).removeprefix("torch.")
    followed(outer, versions, 5, address, dtype)
    step(outer, 4)
    board, states = board_of(address), SavedStates(board_of(address))
    newest, before = states.newest()
    key, other = (f"state/{one.name}/0/{part}" for one in (newest, before))
    if harm == "missing":
        board.delete(key)
    elif harm in ("form", "stream"):
        tree = states.read_part(newest.name, 0, part)
        tree["pieces"] = [3] if harm == "form" else [{**one, "data": one["data"].flip(0)} for one in tree["pieces"]]
        states.write(newest.name, 0, {part: tree})
    else:
        content = board.get(key)
        wrong = {"bit": content[:-1] + bytes([content[-1] ^ 1]), "short": content[:-1], "another": board.get(other)}
        board.put(key, wrong[harm])
    version = next(versions)
    assert same(version.weights, whole(address, dtype))
    (sentence,) = said
    assert sentence.startswith(f"Step {newest.position} is read whole, as a difference to it can't be used: ")
    sizes = followed(outer, versions, 2, address, dtype)
    assert max(sizes) < version.num_bytes
    outer.close()


def test_another_first_member_is_followed_from_a_whole_version_on(tmp_path):
    address, said = tmp_path.as_uri(), []
    outer, member = trained(address, RECIPE, 5, network())
    versions = iter(Reader(address, refused=said.append, dtype=torch.bfloat16))
    followed(outer, versions, 5, address, torch.bfloat16)
    kill(outer, member, address)
    again, _ = trained(address, RECIPE, 1, network())
    sizes = followed(again, versions, 4, address, torch.bfloat16)
    assert sizes[-1] * 5 < sizes[0]
    (sentence,) = said
    assert "is read whole, as there are no differences to it" in sentence
    again.close()


class Killed(BaseException):
    """The reader's process, by the test."""


def test_a_reader_that_is_killed_and_started_at_any_moment_has_equal_bits(tmp_path, monkeypatch):
    """It is killed before each of its requests in turn, and may be killed again right after it was started."""
    address, dtype, left = tmp_path.as_uri(), torch.bfloat16, [float("inf")]
    outer, _ = trained(address, RECIPE, 5, network())
    reading = threading.get_ident()

    def dying(ask):
        def asked(board, *args, **options):
            if threading.get_ident() == reading:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
            return ask(board, *args, **options)

        return asked

    for name in ("read_name", "write_name", "find_names"):
        monkeypatch.setattr(FolderBoard, name, dying(getattr(FolderBoard, name)))
    versions = iter(Reader(address, dtype=dtype))
    by_difference = killed = 0
    for number in range(90):
        left[0] = float("inf")
        step(outer, 4)
        left[0] = number % 30
        try:
            version = next(versions)
        except Killed:
            killed += 1
            versions = iter(Reader(address, dtype=dtype))
            left[0] = float("inf")
            version = next(versions)
        left[0] = float("inf")
        by_difference += version.num_bytes < 1000
        assert same(version.weights, whole(address, dtype))
    assert killed > 20
    assert by_difference > 20
    outer.close()


def followed_in_shards(address, member):
    """Train a replica of two ranks whose versions rank 0 reads; return how many bytes each took."""
    with in_shards(address, member, 1, state_every=2) as outer:
        sizes, versions = [], iter(Reader(address, dtype=torch.float32))
        for _ in range(8):
            outer.step()
            outer._quorum.membership.saver._saving.result()
            if dist.get_rank() == 0:
                version = next(versions)
                assert same(version.weights, whole(address, torch.float32))
                sizes.append(version.num_bytes)
            dist.barrier()
    return sizes


def test_a_replica_of_several_ranks_is_read_by_differences_too(tmp_path):
    address = tmp_path.as_uri()
    member = LauncherNotes(transport_at(address).board).enroll("replica")
    sizes, _ = run_ranks(followed_in_shards, 2, address, member)
    assert max(sizes[4:]) < min(sizes[:3])


@pytest.mark.package("peft")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_peft_loads_the_adapter_of_a_run_from_a_folder(tmp_path, dtype):
    import peft  # which takes seconds

    folder = tmp_path / "adapter"
    folder.mkdir()

    def network():
        return nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 40), nn.Linear(40, 20))

    settings = peft.LoraConfig(r=2, target_modules=["0", "1"], modules_to_save=["2"])
    model = peft.get_peft_model(network(), settings)
    outer, _ = trained(tmp_path.as_uri(), diloco(4), 5, model)
    versions = iter(Reader(tmp_path.as_uri(), dtype=dtype))
    first = next(versions)
    for _ in range(3):
        step(outer, 4)
        next(versions)
    outer.close()
    version = next(versions)
    assert version.is_last
    assert dtype is None or version.num_bytes * 5 < first.num_bytes
    assert version.save(folder).startswith("6 tensors after step")
    found = peft.PeftModel.from_pretrained(network(), folder)
    trainable = [name for name, one in model.named_parameters() if one.requires_grad]
    mine, theirs = model.state_dict(), found.state_dict()
    assert all(torch.equal(mine[name].to(dtype or torch.float32).float(), theirs[name].float()) for name in trainable)
