# SPDX-License-Identifier: Apache-2.0
"""Runs one of Accelerate's own test programs from its file; what it would download is made here.

The ranks that run it import this file, which imports no Accelerate: Farflung is to answer for it.
"""

import ast
import importlib.util
import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import farflung
from farflung.config import environ

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree"]


class Without(ast.NodeTransformer):
    """Leaves statements out of a function, whatever blocks they are in."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.found: set[str] = set()

    def visit_Expr(self, node: ast.stmt) -> ast.AST:
        matched = {text for text in self.texts if text in ast.unparse(node)}
        self.found |= matched
        return ast.copy_location(ast.Pass(), node) if matched else node

    visit_Assign = visit_Expr


class Metric:
    """Accuracy, as the metric of GLUE's MRPC tells it."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        pairs, self.pairs = self.pairs, []
        return {"accuracy": sum(one == other for one, other in pairs) / len(pairs)}


def load_dataset(*_: Any, **__: Any) -> Any:
    """Pairs of sentences that say the same or not, in the columns of MRPC."""
    import datasets

    def pairs(count: int) -> Any:
        chosen = torch.randint(4, len(WORDS), (count, 2, 5), generator=torch.Generator().manual_seed(count)).tolist()
        said = [[" ".join(WORDS[word] for word in sentence) for sentence in pair] for pair in chosen]
        texts = {f"sentence{side + 1}": [pair[side] for pair in said] for side in (0, 1)}
        numbers = {"label": [k % 2 for k in range(count)], "idx": list(range(count))}
        return datasets.Dataset.from_dict(texts | numbers)

    return datasets.DatasetDict(train=pairs(50), validation=pairs(37))


def make_model(folder: Path) -> None:
    """Write a BERT of one layer with random weights, and its tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **shape)).save_pretrained(folder)


def main(path: str, left_out: list[str], arguments: list[str]) -> None:
    """Run the program at `path` with `arguments`; its `main` without the statements with a text of `left_out`."""
    if "external_deps" in path:
        import datasets

        datasets.load_dataset = load_dataset
        datasets.disable_progress_bars()
        sys.modules["evaluate"] = evaluate = ModuleType("evaluate")
        evaluate.load = lambda *_: Metric()
    tree = ast.parse(Path(path).read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    without = Without(left_out)
    without.visit(function)
    assert without.found == set(left_out), f"no statement of main has {set(left_out) - without.found}"
    program = importlib.util.module_from_spec(importlib.util.spec_from_file_location("program", path))
    sys.modules["program"] = program  # what it pickles is found there
    exec(compile(tree, path, "exec"), program.__dict__)
    sys.argv = [path, *arguments]
    program.main()


def main_as_rank(path: str, left_out: list[str], arguments: list[str], folder: Path) -> str:
    """Do what `farflung launch --as-accelerate --cpu` has a rank do, in `folder`; return what the program prints."""
    farflung.install_as_accelerate()
    environ.export({"ACCELERATE_USE_CPU": "true"})
    os.chdir(folder)
    with redirect_stdout(StringIO()) as printed:
        main(path, left_out, arguments)
    return printed.getvalue()
