# SPDX-License-Identifier: Apache-2.0
"""Friends fine-tune one adapter over a bucket: each saves it for peft, and who pulls the run's weights has it too."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from farflung.testing.patience import patience
from tests.examples.scripts import FOLDER, load
from tests.python import run_farflung


@pytest.mark.package("trl", "peft", "datasets")
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_two_launchers_save_equal_adapters_which_peft_loads_and_a_reader_finds(hub, home):
    line = [sys.executable, "-m", "farflung", "launch", "--cpu", "--elastic", "2:2", "--replicas", "1", "--meet", hub]
    line += ["--as-accelerate", "--outer", "diloco", "--outer-every", "8", "--outer-max-momentum", "0.5"]
    line += [FOLDER / "sft_over_a_bucket.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    names = "one", "other"
    running = [
        subprocess.Popen([*line, "--epochs", "1", "--save", name], env=environment, stderr=subprocess.PIPE, text=True)
        for name in names
    ]
    try:
        said = [process.communicate(timeout=patience(180))[1] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], said
    one, other = (load_file(home / name / "adapter_model.safetensors") for name in names)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(value.count_nonzero() for name, value in one.items() if "lora_B" in name), "it has not trained"

    from peft import PeftModel  # which takes seconds

    network, _ = load("sft_over_a_bucket").load(None)
    loaded = PeftModel.from_pretrained(network, home / "one").state_dict()
    run_farflung("checkpoint", "pull", hub, "pulled.safetensors")
    pulled = load_file("pulled.safetensors")
    assert len(pulled) == len(one), "adapters alone travel"
    assert all(torch.equal(loaded[name], value) for name, value in pulled.items())
    (home / "folder").mkdir()
    run_farflung("checkpoint", "pull", hub, "folder")
    network, _ = load("sft_over_a_bucket").load(None)
    again = PeftModel.from_pretrained(network, home / "folder").state_dict()
    assert all(torch.equal(again[name], value) for name, value in loaded.items())
