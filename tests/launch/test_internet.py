# SPDX-License-Identifier: Apache-2.0
"""The page "Over the open internet": its lines make a tunnel, two machines train through it, and a cable shows nothing.

The machines are network namespaces. Debian's wireguard-go does the tunnel where the kernel can't.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from farflung.testing.patience import patience
from tests.launch.machines import DEVICE, NAMES, two_machines, why_impossible

PAGE = (Path(__file__).parents[2] / "docs" / "meet.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w+ [^\n]+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PORT = 51820
SECRET = b"WxY?"  # a finite fp32 number
# A model of such numbers alone, which rank 0 sends at the start.
TRAINS = f"""
import struct, torch
from farflung import Accelerator
accelerator, model = Accelerator(), torch.nn.Linear(500, 100, bias=False)
with torch.no_grad():
    model.weight.fill_(struct.unpack("<f", {SECRET!r})[0] if accelerator.is_main_process else 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
for _ in range(20):
    accelerator.backward(model(torch.ones(2, 500)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
print("RANKS", accelerator.num_processes)
"""
# Listens to all packets of the cable until the file `done` is there: how many bytes, was the secret among them, and
# what was no packet of WireGuard's.
LISTENS = f"""
import json, os, socket, struct
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.setsockopt(socket.SOL_SOCKET, 33, 1 << 28)  # SO_RCVBUFFORCE
raw.bind(({DEVICE!r}, 0))
raw.settimeout(0.2)
print("ready", flush=True)
num_bytes, is_seen, others = 0, False, set()
while True:
    try:
        packet = raw.recv(1 << 17)
    except TimeoutError:
        if os.path.exists("done"):
            break
        continue
    num_bytes += len(packet)
    is_seen |= {SECRET * 64!r} in packet
    kind, protocol = packet[12:14], packet[23]
    if kind == b"\\x08\\x00" and (protocol != 17 or {PORT} not in struct.unpack("!HH", packet[34:38])):
        others.add(protocol)
print(json.dumps([num_bytes, is_seen, sorted(others)]))
"""


def why_no_tunnel() -> str:
    """Say why there can be no tunnel here; empty where there can."""
    missing = [program for program in ("wg", "wg-quick", "wireguard-go") if shutil.which(program) is None]
    said = f"{', '.join(missing)} not installed (wireguard-tools, wireguard-go)" if missing else why_impossible()
    return said if said or Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(240),
    pytest.mark.skipif(bool(why_no_tunnel()), reason=why_no_tunnel() or "-"),
]


def done(process):
    """Wait for a command of a machine; return what it printed."""
    text, _ = process.communicate(timeout=patience(90))
    assert process.returncode == 0, text
    return text


def open_tunnel(machines, folders):
    """Do what the page says on both machines, up to `wg-quick up`."""
    make, up = (content for title, content in FENCES if title == "sh on both")
    for machine, folder in enumerate(folders):
        done(machines.start(machine, ["sh", "-c", make], folder))
    keys = {
        f"({kind}.key of {name})": (folder / f"{kind}.key").read_text().strip()
        for name, folder in zip(NAMES, folders, strict=True)
        for kind in ("private", "public")
    }
    for machine, (name, folder) in enumerate(zip(NAMES, folders, strict=True)):
        config = dict(FENCES)[f"ini wg0.conf on {name}"]
        for word, key in keys.items():
            config = config.replace(word, key)
        (folder / "wg0.conf").write_text(config)
        # Both machines have one file system; the socket that stands for wg0 must not be the same.
        apart = f"mkdir -p /var/run/wireguard && mount -t tmpfs none /var/run/wireguard && {up}"
        done(machines.start(machine, ["unshare", "--mount", "bash", "-c", apart], folder))


def overheard(machines, folders, command):
    """What the cable shows while both machines train by a command `command(name)`."""
    listener = machines.start(1, [sys.executable, "-c", LISTENS], folders[1])
    assert listener.stdout.readline() == "ready\n"
    for folder in folders:
        (folder / "train.py").write_text(TRAINS)
    running = [machines.start(k, ["sh", "-c", command(NAMES[k])], folders[k]) for k in (0, 1)]
    assert all("RANKS 2" in done(one) for one in running)
    (folders[1] / "done").touch()
    return json.loads(done(listener))


@pytest.mark.usefixtures("warm")
def test_a_cable_shows_plain_weights_without_wireguard_and_none_with_it(tmp_path):
    folders = [tmp_path / name for name in NAMES]
    for folder in folders:
        folder.mkdir()
    lines = dict(FENCES)
    with two_machines() as machines:
        open_tunnel(machines, folders)
        num_bytes, is_seen, others = overheard(machines, folders, lambda name: lines[f"sh on {name}"])
        assert (is_seen, others) == (False, [])
        assert num_bytes > 500 * 100 * 4
        (folders[1] / "done").unlink()
        plainly = {"10.99.0.1": "10.77.0.1", "wg0": DEVICE}

        def without_it(name):
            return re.sub("|".join(plainly), lambda match: plainly[match[0]], lines[f"sh on {name}"])

        num_bytes, is_seen, others = overheard(machines, folders, without_it)
        assert is_seen
        assert 6 in others  # TCP
