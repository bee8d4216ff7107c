# SPDX-License-Identifier: Apache-2.0
"""Files as the system knows them: what is none is refused by name, and those that we write have the umask's mode.

A named pipe with the name of a checkpoint's file would be read for ever, and safetensors writes files that nobody else
may read.
"""

import os
import re
import socket
import stat

import pytest
import torch
from click.testing import CliRunner

from farflung import Accelerator
from farflung.base.errors import CheckpointError
from farflung.checkpoint import paths
from farflung.launch.checkpoint import checkpoint
from farflung.state import AcceleratorState


def pipe(path):
    os.mkfifo(path)


def bound_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fspath(path))


def device(path):
    path.symlink_to("/dev/zero")  # a device node of one's own needs root


ODD = {"a named pipe": pipe, "a socket": bound_socket, "a device": device, "a folder": os.mkdir}
NAMES = ("model.safetensors", "optimizer.bin", "random_states_0.pkl", "loop_state/rank_0.bin", paths.MANIFEST)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A checkpoint in a folder with a short name, as a socket's may not be long; and the run that it is of."""
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state("one")
    yield accelerator, tmp_path / "one"
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ODD)
def test_no_other_kind_of_file_is_opened(kind, saved):
    """Each file in turn, with the manifest that names it and, as in a checkpoint of Accelerate's, without one."""
    accelerator, folder = saved
    manifest = folder / paths.MANIFEST
    for name in NAMES:
        for is_listed in (True, False):
            kept = {path: path.read_bytes() for path in {folder / name, manifest}}
            for path in kept if not is_listed else (folder / name,):
                path.unlink()
            ODD[kind](os.path.relpath(folder / name) if kind == "a socket" else folder / name)
            with pytest.raises(CheckpointError, match=rf"{re.escape(name)} is {kind}, not a file"):
                accelerator.load_state("one")
            (os.rmdir if kind == "a folder" else os.unlink)(folder / name)
            for path, content in kept.items():
                path.write_bytes(content)
    accelerator.load_state("one")


def test_all_weights_that_are_written_have_the_mode_of_any_other_file(saved):
    accelerator, folder = saved
    model = torch.nn.Linear(2, 1)
    forms = {"w.safetensors": "state-dict", "w.pt": "state-dict", "f": "farflung", "a": "accelerate"}
    before = os.umask(0o027)
    try:
        for safe in (True, False):
            accelerator.save_model(model, "whole", safe_serialization=safe)
            accelerator.save_model(model, "shards", max_shard_size=8, safe_serialization=safe)
            accelerator.save(model.state_dict(), f"saved_{safe}", safe_serialization=safe)
            accelerator.save_state(f"state_{safe}", safe_serialization=safe)
        for name, form in forms.items():
            done = CliRunner().invoke(checkpoint, ["convert", "one", f"converted/{name}", "--to", form])
            assert done.exit_code == 0, done.output
    finally:
        os.umask(before)
    new = [path for path in folder.parent.rglob("*") if path.is_file() and not path.is_relative_to(folder)]
    assert len(new) > 20
    assert {stat.S_IMODE(path.stat().st_mode) for path in new} == {0o640}
