# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory and ms-swift train an adapter from files, each by the function that its command calls."""

import json
import os
import time

from common import FOLDER, NAME, SAVED, WORLD
from with_trl import SETTINGS, Watch, model, talks, tokenizer

FILES = FOLDER / f"files-{os.getpid()}"
TRAIN, HELD_OUT = str(FILES / "train.json"), str(FILES / "held_out.json")
LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0}
LENGTH = 64  # in tokens


def write_files():
    """Write the model, its tokenizer, and questions with answers in the format of Alpaca."""
    model().save_pretrained(FILES)
    tokenizer().save_pretrained(FILES)
    for path, seed, count in ((TRAIN, 0, 96), (HELD_OUT, 1, 16)):
        rows = [
            {"instruction": row["prompt"][0]["content"], "input": "", "output": row["completion"][0]["content"]}
            for row in talks(seed, count, ["completion"])
        ]
        with open(path, "w") as file:
            json.dump(rows, file)


def llamafactory(watch):
    import trl

    for name in ("AutoModelForCausalLMWithValueHead", "PPOConfig", "PPOTrainer"):
        setattr(trl, name, type(name, (), {}))  # trl 1 has none: LLaMA-Factory imports them for its PPO
    from llamafactory.train.tuner import run_exp

    names = {"train": TRAIN, "held_out": HELD_OUT}
    (FILES / "dataset_info.json").write_text(json.dumps({name: {"file_name": path} for name, path in names.items()}))
    data = {"dataset_dir": str(FILES), "dataset": "train", "eval_dataset": "held_out", "template": "alpaca"}
    settings = {name: SETTINGS[name] for name in SETTINGS if name not in ("max_length", "gradient_checkpointing")}
    settings["disable_gradient_checkpointing"] = True  # that of LLaMA-Factory fails with this transformers
    run_exp(
        {
            **{"stage": "sft", "do_train": True, "finetuning_type": "lora", "cutoff_len": LENGTH},
            **{"model_name_or_path": str(FILES), "output_dir": str(SAVED)},
            **(settings | data | LORA),
        },
        [watch],
    )
    return SAVED


def ms_swift(watch):
    from swift import SftArguments, callbacks_map, sft_main

    callbacks_map["watch"] = lambda arguments, trainer: watch
    own = {"torch_dtype": "float32", "fp16": False, "bf16": False, "gradient_accumulation_steps": 1}
    arguments = SftArguments(
        model=str(FILES), model_type="llama", template="default", dataset=[TRAIN], val_dataset=[HELD_OUT],
        callbacks=["watch"], output_dir=str(SAVED), add_version=False, check_model=False,
        **(SETTINGS | LORA | own | {"max_length": LENGTH}),
    )  # fmt: skip
    ended = sft_main(arguments)
    return ended["best_model_checkpoint"] or ended["last_model_checkpoint"]


def wait_for_all():
    """Wait until all ranks have come here, as LLaMA-Factory ends its process group before."""
    (FOLDER / f"ended-{os.getpid()}").touch()
    while len(list(FOLDER.glob("ended-*"))) < WORLD:
        time.sleep(0.1)


if __name__ == "__main__":
    watch = Watch()
    write_files()
    folder = globals()[NAME.replace("-", "_")](watch)
    wait_for_all()
    watch.report(folder)
