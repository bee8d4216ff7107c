# SPDX-License-Identifier: Apache-2.0
"""Replicas as real processes that are killed, stopped and started again while they train.

Each replica moves its weights by -1 in each step, and the outer optimizer takes the mean as it is. So the weights are
`START - position` after every step of every replica, as long as no step is lost and none counts twice.
"""

import faulthandler
import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
from torch import nn

from farflung.address import schemes as address
from farflung.address.c10d_transport import PATIENCE_S, C10dTransport
from farflung.address.folder import FolderBoard
from farflung.address.keyed_store import KeyedServer
from farflung.address.member_store import LauncherNotes
from farflung.address.object_group import ObjectGroup
from farflung.address.seal import Seal
from farflung.base import sizes
from farflung.base.errors import Unreachable
from farflung.base.torch_internals import default_store
from farflung.config import environ
from farflung.config.key import run_key
from farflung.members.elastic import Elastic
from farflung.outer import OuterLoop, diloco
from farflung.process.sockets import listening_socket
from farflung.testing.patience import patience
from farflung.testing.ranks import fork_context
from tests.faults import fail_at
from tests.s3_server import given_variables

START, EVERY = 2.0**20, 4


class Blocks(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(numel, 1, bias=False) for _ in range(2)])
        for parameter in self.parameters():
            nn.init.constant_(parameter, START)
        self.register_buffer("unsaved", torch.tensor(os.getpid()), persistent=False)


def transport_at(place, patience_s=PATIENCE_S):
    """How replicas meet: at the port of a store on this machine, or at an address."""
    seal = Seal(key) if (key := run_key()) else None
    if not isinstance(place, int):
        return address.transport_at(place, patience_s, seal)
    return C10dTransport(("127.0.0.1", place), seal=seal)


def begun(play, pipe, place, folder, member, variables, *rest):
    """Begin a replica in a process of the fork server, which has the variables of the first test that started one."""
    os.environ.pop(environ.KEY, None)
    os.environ.update(variables)
    play(pipe, place, folder, member, variables, *rest)


def replica(pipe, place, folder, member, *row):
    """Train as `train` does, in a working folder; an error is said, too."""
    os.chdir(folder)
    try:
        train(pipe, place, member, *row)
    except Exception as error:
        pipe.send({"member": member, "at": time.time(), "error": f"{type(error).__name__}: {error}"})
        raise


def as_of_many(*row):
    """Be a replica that exchanges values as many do in a bucket: sums in two hops, and votes in names."""
    ObjectGroup.hop_bytes, sizes._FEW, FolderBoard.lists_at_once = 0, 1, True
    replica(*row)


def train(pipe, place, member, variables, step_s, numel, dies, recipe, saves, damages, moves, proposals, options):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    transport = transport_at(*place)
    board = transport.board.patient(0)
    model, membership = Blocks(numel), Elastic(transport, member, **options)
    fault = fail_at(*dies or ("local step", 0))

    def say(**what):
        pipe.send({"member": member, "at": time.time(), "generation": membership.record.number} | what)

    known = 10**9

    def last():
        nonlocal known
        with suppress(Unreachable):
            known = int(board.get("last") or known)
        return known

    def weight():
        values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        return float(values[0]) if bool((values == values[0]).all()) else values.unique().tolist()

    recipe = replace(recipe or diloco(EVERY, lr=1.0, momentum=0.0), same_data=True)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)  # it takes no step; some recipes ask for its rate
    checkpoint = None
    if recipe.least == 1:
        with OuterLoop(Blocks(numel), recipe, bucket_bytes=4 * numel, inner=inner) as another:
            checkpoint = another.state_dict()
    among = membership
    if dies:  # runs without a failure are measured
        recipe, among = fault.recipe(recipe), fault.membership(membership)
    with OuterLoop(model, recipe, membership=among, bucket_bytes=4 * numel, inner=inner) as outer:
        outer.listeners.append(lambda one: say(**figures_of(one)))
        if outer.is_newcomer and checkpoint:  # a script that begins with its newest one does not know that it is one
            outer.load_state_dict(checkpoint)
        if damages:
            anchors = [one.weights.rows()["anchor"] for one in outer._rounds.replica.fragments]
            with torch.no_grad():  # its moves are right, where it begins is not
                for tensor in (*model.parameters(), *(chunk for chunks in anchors for chunk in chunks)):
                    tensor += 1
        say(joined=outer.position, weight=weight())
        while outer.position < last():
            time.sleep(step_s)
            fault.reach("local step")
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= moves
            outer.step()
            say(position=outer.position, weight=weight())
            if outer.position in proposals:
                outer.change_schedule(proposals[outer.position])
            if saves and outer.position % saves == 0:
                fault.reach("saving")
                outer.state_dict()
        stats = outer.stats()
    changes = [(one.step, one.every) for one in outer.changes]
    say(end=outer.position, weight=weight(), changes=changes, unsaved=int(model.unsaved), stats=stats.as_dict())


def figures_of(this):
    """What is said of a round."""
    weights = {"step": this.step, "weights": dict(zip(this.members, this.weights, strict=True))}
    changes = {"lost": dict(this.lost), "new": this.joined, "recovering_s": this.seconds_recovering}
    return {"round": this.number, "ranks": len(this.weights)} | changes | weights


def served(seal=None, port=0):
    """A store that this process serves to all on this machine, or to those that have a key."""
    return KeyedServer(listening_socket("127.0.0.1", port), "127.0.0.1", seal)


def transport_of_ranks():
    """How the ranks of the default process group meet as members of a run, which the first one serves."""
    store = default_store()
    if dist.get_rank() == 0:
        store.set("served", str(served().port))
    return C10dTransport(("127.0.0.1", int(store.get("served"))))


class LocalLine:
    """The line to a c10d store of this process."""

    def __init__(self, store):
        self.store = store

    def ask(self, act, patience_s):
        return act(self.store)

    write = ask


def serve(pipe, key):
    """Serve the store of a run."""
    store = served(Seal(key) if key else None)
    pipe.send(store.port)
    time.sleep(3600)


class ElasticRun:
    """A run whose launcher is this process.

    Args:
        address: where replicas meet; None: at a store that a process serves.
        patience_s: how long requests to an address may fail.
        folder: where replicas write files.
        play: what a replica's process does.
        options: those of `Elastic`.
    """

    def __init__(
        self,
        step_s=0.005,
        numel=64,
        recipe=None,
        address=None,
        patience_s=PATIENCE_S,
        folder=".",
        play=replica,
        **options,
    ):
        self._folder, self._row = os.path.abspath(folder), (step_s, numel)
        self._recipe, self._options, self._play = recipe, options, play
        self._context = fork_context()
        self._place, self._server = (address, patience_s), None
        if address is None:
            here, there = self._context.Pipe(duplex=False)
            self._server = self._context.Process(target=serve, args=(there, run_key()))
            self._server.start()
            self._place = (here.recv(),)
        self.board = transport_at(*self._place).board
        self.notes = LauncherNotes(self.board)
        self.processes, self.said, self.events, self._pipes = {}, [], [], {}
        self.codes = {}  # exit codes of replicas, which one thread alone may ask for
        self._joined, self._alive, self._unrecorded = set(), set(), []
        self._lock, self._goes_on, self._has_store = threading.Lock(), True, True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._goes_on = False
        self._reader.join()
        for process in (*self.processes.values(), *([self._server] if self._server else [])):
            process.kill()
            process.join()

    def start(self, name, dies=None, saves=0, recipe=None, damages=False, moves=1, slower=1, proposals=()):
        """Start a replica; return its id.

        Args:
            dies: a phase, its count and maybe what happens then, for `fail_at`.
            damages: change what it has got once.
            moves: how far it moves in each step, downwards.
            slower: how many times as long as the others' its steps take.
            proposals: another H by the step after which it is proposed.
        """
        member = self.notes.enroll(f"replica {name}")
        here, there = self._context.Pipe(duplex=False)
        (step_s, numel), recipe = self._row, recipe or self._recipe
        row = (given_variables(), slower * step_s, numel, dies, recipe, saves, damages, moves, proposals, self._options)
        row = (there, self._place, self._folder, member, *row)
        process = self._context.Process(target=begun, args=(self._play, *row))
        process.start()
        there.close()
        with self._lock:
            self.processes[member], self._pipes[here] = process, member
            self._alive.add(member)
        return member

    def joins(self, name, **options):
        """Start a replica as `start` does, and wait until it trains."""
        member = self.start(name, **options)
        self.until(lambda: self.joined(member))
        return member

    def kill(self, *members):
        """Kill replicas, and wait until they have ended."""
        for member in members:
            self.signal(member, signal.SIGKILL)
        self.until(lambda: self.has_ended(*members))

    def signal(self, member, number):
        """Send a signal to a replica, and tell the others what a launcher would."""
        os.kill(self.processes[member].pid, number)
        if number == signal.SIGSTOP:
            self.notes.put("stopped", member)
        elif number == signal.SIGCONT:
            self.notes.forget(member, "stopped")

    def lets_back(self, member, name, steps=0):
        """Once the others have left a stopped replica out and made so many steps, let it go on until it is back."""
        self.until(lambda: any(f"replica {name} is out" in event for event in self.events))
        self.go_on(steps)
        self.signal(member, signal.SIGCONT)
        self.until(lambda: any(f"replica {name} joined" in event for event in self.events))

    def close_store(self):
        """End the store, as its launcher would."""
        self.leave_store()
        self._server.kill()

    def leave_store(self):
        """Ask nothing more of the store."""
        self._has_store = False

    def _read(self):
        """Collect what replicas say, and tell the others at once when one has ended."""
        while self._goes_on:
            with self._lock:
                alive = {self.processes[member].sentinel: member for member in self._alive}
                pipes = dict(self._pipes)
            for ready in wait([*alive, *pipes], timeout=0.02):
                if ready in pipes:
                    self._take(ready)
                else:
                    self._note_end(alive[ready])
            with suppress(Unreachable):  # it may be back for the next look
                while self._unrecorded and self._has_store:
                    self.notes.note_end(*self._unrecorded[0])
                    del self._unrecorded[0]
                if self._has_store:
                    self.events += map(str, [*self.notes.receive(), *self.notes.strangers()])

    def _take(self, pipe):
        """Take all that a replica has said, so that it never waits for this process."""
        try:
            while pipe.poll():
                self.said.append(pipe.recv())
                if "joined" in self.said[-1]:
                    self._joined.add(self.said[-1]["member"])
        except (EOFError, OSError):
            with self._lock:
                self._pipes.pop(pipe)

    def _note_end(self, member):
        with self._lock:
            self._alive.remove(member)
        self.processes[member].join()
        code = self.processes[member].exitcode
        if code:
            self._unrecorded.append((member, f"killed by {signal.Signals(-code).name}" if code < 0 else "error"))
        self.codes[member] = code

    def until(self, condition, timeout_s=20.0):
        """Wait until something holds."""
        deadline = time.monotonic() + patience(timeout_s)
        while not condition():
            if time.monotonic() > deadline:
                for member, process in self.processes.items():
                    if member not in self.codes:
                        os.kill(process.pid, signal.SIGUSR1)  # it prints where it is
                time.sleep(0.5)
                raise TimeoutError(json.dumps([self.events, self.said[-5:]]))
            time.sleep(0.005)

    def at(self, position):
        """Whether some replica has come to a step."""
        return any(one.get("position", 0) >= position for one in list(self.said))

    def go_on(self, steps):
        """Wait until some replica has made so many more steps."""
        furthest = max(one["position"] for one in list(self.said) if "position" in one)
        self.until(lambda: self.at(furthest + steps))

    def has_ended(self, *members):
        """Whether replicas have ended, well or not."""
        return self.codes.keys() >= set(members)

    def joined(self, *members):
        """Whether replicas have begun to train."""
        return self._joined.issuperset(members)

    def finish(self, steps=10, timeout_s=30.0):
        """Let all train a few more steps, and end; return what they said."""
        furthest = max((one.get("position", 0) for one in list(self.said)), default=0)
        self.board.put("last", str(furthest + steps).encode())
        self.until(lambda: self.has_ended(*self.processes), timeout_s)
        with suppress(TimeoutError):
            self.until(lambda: not self._pipes, 2.0)
        return self.said


def wrong(said):
    """Return what was said that shows a lost step, or one that counted twice."""
    places = ("position", "end", "joined")
    return [one for one in said for place in places if place in one and one["weight"] != START - one[place]]
