# SPDX-License-Identifier: Apache-2.0
"""Which frameworks train under Farflung as they are: `python benchmarks/frameworks/run.py [names]`.

It makes an environment with the packages of `versions.txt` over the one that it runs in, which has torch, and runs each
program as two replicas in each mode. A program is right if the replicas end with the same weights in memory, the losses
of the latest validation, of the file saved then and of the weights in memory are the same, and this loss is at most 1.3
times that of DDP. One JSON line for each program, kept with `--write`; `--table` prints the table of what was kept.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from _measure import RESULTS, report  # noqa: E402

OUTER = ["--outer", "diloco", "--outer-every", "8"]
MODES = {
    "ddp": ["--num_processes", "2"],
    "outer": ["--num_processes", "2", *OUTER],
    "elastic": ["--elastic", "2:2", *OUTER],
    "meet": ["--elastic", "2:2", "--meet", "file://{folder}/run", *OUTER],
    "as-accelerate": ["--num_processes", "2", "--as-accelerate", *OUTER],
}
FILES = {  # of programs, with the package that each is about
    "with_lightning.py": {
        **dict.fromkeys(
            ("lightning", "lightning-gan", "lightning-resumed", "lightning-loaders", "fabric"), "lightning"
        ),
        **{name: name for name in ("litgpt", "darts", "pytorch-forecasting")},
    },
    "with_ignite.py": {"ignite": "pytorch-ignite", "monai": "monai"},
    "own_loops.py": {
        **dict.fromkeys(("keras", "keras-fit"), "keras"),
        **{name: name for name in ("pytorch-metric-learning", "timm", "x-transformers")},
        "open-clip": "open_clip_torch",
        **dict.fromkeys(("torchtune", "torchtune-recipe"), "torchtune"),
    },
    "with_trl.py": {"trl-sft": "trl", "trl-dpo": "trl"},
    "with_tuners.py": {name: name for name in ("llamafactory", "ms-swift")},
    "trainers.py": {
        "composer": "mosaicml",
        **{name: name for name in ("fastai", "speechbrain", "sentence-transformers", "setfit")},
        **{name: name for name in ("skorch", "catalyst", "ultralytics")},
        "denoising-diffusion": "denoising-diffusion-pytorch",
    },
}
PROGRAMS = {name: (file, package) for file, programs in FILES.items() for name, package in programs.items()}
ON_ACCELERATE = (
    *FILES["with_trl.py"],
    *FILES["with_tuners.py"],
    *("fastai", "sentence-transformers", "setfit", "skorch", "catalyst", "denoising-diffusion"),
)
OURS = r"(?:farflung\.base\.errors\.)?(?:ConfigError|Unsupported|StateError|CollectiveMismatch)"
FLAGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
FLAGS["DISABLE_VERSION_CHECK"] = "1"  # of LLaMA-Factory


def make_environment(folder):
    """Install the packages over those of this environment, without what they would add: the file has all versions."""
    if not (folder / "bin" / "python").exists():
        venv.create(folder)
    inside = next(folder.glob("lib/python*/site-packages"))
    here = [path for path in sys.path if path.endswith("site-packages")]
    (inside / "over.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-r", str(HERE / "versions.txt")], check=True)
    for built in inside.glob("torchaudio/lib/*.so"):
        built.unlink()  # for CUDA: it does without them
    (inside / "torchvision" / "_meta_registrations.py").write_text("")  # of its operators for CUDA, which aren't there
    return folder / "bin" / "python"


def launched(python, program, mode, limit_s=240):
    """Run a program in a mode; return its exit code, the reports of its ranks, and all that it printed."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [flag.format(folder=folder) for flag in MODES[mode]]
        line = [str(python), "-m", "farflung", "launch", "--cpu", "--max_restarts", "0", *flags]
        line += [str(HERE / PROGRAMS[program][0]), program, folder]
        try:
            run = subprocess.run(
                line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, cwd=folder,
                env={**os.environ, **FLAGS, "COLUMNS": "400", "HF_HOME": folder, "MODELSCOPE_CACHE": folder},
            )  # fmt: skip
            code, text = run.returncode, run.stdout
        except subprocess.TimeoutExpired as error:
            code, text = None, (error.stdout or b"").decode(errors="replace")
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    return code, ranks, text


def verdict(code, ranks, text, ddp):
    """Return what came out in a few words, which begin with right, refused, or what is wrong."""
    if code is None:
        return "hangs"
    text = re.sub(r"\s*│\n│ (?=\S)(?!rank)\s*", " ", text)  # lines of a box
    if errors := re.findall(rf"{OURS}: (.+?)\s*(?:│|$)", text, re.MULTILINE):
        return f"refused: {max(errors, key=len)}"
    if warnings := re.findall(r"warning: (--outer .+ did nothing: .+|.+ none of its outer loops ever met .+)", text):
        return f"refused: {warnings[-1]}"
    if code:
        errors = re.findall(r"((?:\w+\.)*\w*(?:Error|Exception): .+?)\s*(?:│|$)", text, re.MULTILINE)
        reason = errors[-1] if errors else text.strip().splitlines()[-1]
        return f"fails: {re.sub(r'/[^ )]*/', '', reason)}"  # without this machine's folders
    wrong = [] if len(ranks) == 2 else [f"{len(ranks)} of 2 replicas reported"]
    if len({rank["weights"] for rank in ranks}) > 1:
        wrong.append("replicas differ")
    losses = [rank[name] for rank in ranks for name in ("loss", "validated", "saved")]
    if max(losses, default=0) != min(losses, default=0):
        wrong.append(
            "losses in memory, validated and saved: " + ", ".join(f"{loss:.4f}" for loss in sorted(set(losses)))
        )
    if any(math.isnan(loss) or (ddp is not None and loss > 1.3 * ddp) for loss in losses):
        wrong.append(f"loss {max(losses):.3f}, with DDP {ddp:.3f}")
    return "; ".join(wrong) or "right"


def measure(python, program, modes, show):
    figures, ddp = {}, kept().get(program, {}).get("ddp", {}).get("loss")
    for mode in modes:
        if mode == "as-accelerate" and program not in ON_ACCELERATE:
            continue
        code, ranks, text = launched(python, program, mode)
        found = verdict(code, ranks, text, None if mode == "ddp" else ddp)
        loss = ranks[0]["loss"] if ranks else None
        ddp = loss if mode == "ddp" else ddp
        sent = re.findall(r"([\d.]+ [kM]?B) sent", text)
        figures[mode] = {"verdict": found[:400], "loss": loss, "sent": sent[-1] if sent else None}
        print(f"{program}, {mode}: {figures[mode]}", file=sys.stderr, flush=True)
        if show:
            print(text, file=sys.stderr)
    return figures


def kept():
    """Return the latest figures of each mode by program, with the version that they are of."""
    latest, path = {}, RESULTS / "frameworks.jsonl"
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        latest.setdefault(line["program"], {}).update(line["figures"], version=line["version"])
    return latest


def table():
    """Return the table of the latest results, for docs/frameworks.md."""
    latest = kept()
    rows = ["| program | `outer` | `elastic`, `meet` | `as-accelerate` |", "|---" * 4 + "|"]
    for name in (name for name in PROGRAMS if name in latest):
        cells = []
        for mode in list(MODES)[1:]:
            figures = latest[name].get(mode)
            found = "" if figures is None else re.split("[:;]", figures["verdict"])[0]
            cell = figures["sent"] if found == "right" else found
            if mode != "meet":
                cells.append(cell)
            elif cell != cells[-1]:
                cells[-1] += f"; {cell}"
        rows.append(f"| {name} {latest[name]['version']} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main(given=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of programs: {', '.join(PROGRAMS)}")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--env", type=Path, default=HERE.parents[1] / ".venv-frameworks")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    parser.add_argument("--show", action="store_true", help="print what the programs print")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    parser.add_argument("--table", action="store_true", help="print the table of what was kept, and run nothing")
    flags = parser.parse_args(given)
    if flags.table:
        return print(table())
    python = make_environment(flags.env)
    files = HERE / "versions.txt", HERE.parents[1] / "constraints.txt"
    pins = {
        name: version
        for file in files
        for name, version in re.findall(r"^([\w.-]+)==([^;\s]+)", file.read_text(), re.MULTILINE)
    }
    names = flags.names or list(PROGRAMS)
    with ThreadPoolExecutor(flags.jobs) as pool:
        rows = pool.map(lambda name: measure(python, name, flags.modes, flags.show), names)
        for name, figures in zip(names, rows, strict=True):
            facts = {"program": name, "version": pins[PROGRAMS[name][1]]}
            report("frameworks", figures, seed=0, write_to="frameworks.jsonl" if flags.write else None, **facts)


if __name__ == "__main__":
    main()
