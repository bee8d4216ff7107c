# SPDX-License-Identifier: Apache-2.0
"""Bars of commands and calls on checkpoints: whole at the end, on terminals alone, and of main processes."""

import io
import re
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

from farflung import Accelerator
from farflung.base import bars
from farflung.outer import diloco
from farflung.testing.ranks import run_ranks
from farflung.utils import merge_fsdp_weights, save_fsdp_model
from tests.base.test_bars import in_terminal, terminal  # noqa: F401  (a fixture)
from tests.outer.test_saved_state import trained
from tests.python import run_python

AT_ONCE = "from farflung.base import bars; bars._PATIENCE_S = bars._REDRAW_S = 0"
COMMANDS = """
from farflung.launch.checkpoint import checkpoint
for words in {commands}:
    print("==", *words)
    checkpoint([str(word) for word in words], standalone_mode=False)
"""
FULL = r"{what} .*?(\d+\.\d)/\1 MB"  # in one line, a bar that has come to its end


def parts_of(said):
    """What was said after each line that begins with ==, by the word that follows."""
    pieces = re.split(r"(?m)^.*?== (.+?)\r?\n", said)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.usefixtures("warm")
def test_commands_show_what_is_written_and_read(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1000, 1000))
    one, other, here = tmp_path / "one", tmp_path / "other", tmp_path / "here"
    accelerator.save_state(one)
    with torch.no_grad():
        model.weight += 1
    accelerator.save_state(other)
    (tmp_path / "run").mkdir()
    address, pulled = (tmp_path / "run").as_uri(), tmp_path / "pulled.safetensors"
    trained(address, diloco(4), 9, nn.Linear(500, 500))[0].close()
    expected = {
        ("verify", one): ["Verifying one"],
        ("diff", one, other): ["Reading both", r"Comparing model\.safetensors"],
        ("convert", one, here, "--to", "farflung"): ["Verifying one", "Writing here"],
        ("convert", one, tmp_path / "w.pt", "--to", "state-dict"): ["Verifying one", r"Writing w\.pt"],
        ("pull", address, pulled): ["Reading step 9"],
    }
    commands = [tuple(map(str, words)) for words in expected]
    program = tmp_path / "program.py"  # which a warm Python runs, other than code on the command line
    program.write_text(f"{AT_ONCE}\n{COMMANDS.format(commands=commands)}")
    said = parts_of(in_terminal(program, width=200))
    for words, shown in expected.items():
        for what in shown:
            found = said[" ".join(map(str, words))]
            assert re.search(FULL.format(what=what), found), found
    for path in (here, tmp_path / "w.pt", pulled):
        path.rename(path.with_name(f"old-{path.name}"))
    done = run_python(program)
    assert done.stderr == "", "nothing in a pipe"
    assert f"{one}: complete" in done.stdout


def all_bars(folder, address):
    """What each process would show in a terminal of its own."""
    bars._PATIENCE_S = bars._REDRAW_S = 0.0
    screen = io.StringIO()
    screen.isatty = lambda: True
    with redirect_stderr(screen):
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(nn.Linear(1000, 1000))
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        accelerator.save_state(folder / "later", block=False)
        accelerator.save_state(f"{address}/sent")
        accelerator.load_state(f"{address}/sent")
        accelerator.save_state(f"{address}/later", block=False)
        accelerator.end_training()
        save_fsdp_model(None, accelerator, model, folder / "parts")
        merge_fsdp_weights(folder / "parts" / "pytorch_model_fsdp_0", folder / "merged")
    return screen.getvalue()


def test_no_process_but_the_main_one_shows_anything(tmp_path, bucket):
    first, second = run_ranks(all_bars, 2, tmp_path / "saved", bucket)
    parts = "Reading pytorch_model_fsdp_0", r"Writing model\.safetensors"
    for what in ("Writing saved", "Verifying saved", "Writing sent", "Sending sent", "Fetching sent", *parts):
        assert re.search(FULL.format(what=what), first), first
    assert "later" not in first, "training goes on meanwhile, and prints"
    assert second == ""
