# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model Muon trains, and which are left to AdamW."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from farflung.base.checks import check_type, wrong_type
from farflung.base.errors import ConfigError, Unsupported
from farflung.comm.shards import is_sharded


def muon_groups(model: nn.Module, adamw: Iterable[str] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters of a model into hidden matrices, for Muon, and all others, for AdamW.

        hidden, others = muon_groups(model)
        optimizers = torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others, lr=lr)

    Hidden matrices are the parameters `[out, in]` whose name ends in `weight`, other than embeddings and the head. An
    embedding is the weight of an `nn.Embedding` or `nn.EmbeddingBag`, and so is a head that is tied to it. A head that
    is not tied is the last weight `[out, in]` in the order in which the model registers them; a transformers model also
    says which module its head is (`get_output_embeddings`). Models don't say which other matrices face their inputs or
    outputs: name those in `adamw`, such as the first layer of a perceptron or the second of two heads. Vectors,
    convolutions, stacked experts and parameters with other names, such as a table of positions, are never for Muon.

    Args:
        adamw: names of parameters, or of modules with all of theirs, that are left to AdamW too.

    Returns:
        hidden matrices and others, each in the order of `model.parameters()`.

    Raises:
        ConfigError: the model has no parameter or module of a name in `adamw`, or no hidden matrix is left.
        Unsupported: a hidden matrix is sharded; `torch.optim.Muon` orthogonalizes whole matrices.

    Source: MuLoCo (arXiv:2505.23725), and Muon (kellerjordan.github.io/posts/muon).
    """
    check_type("muon_groups: model", model, nn.Module, "the model to train")
    if isinstance(adamw, str):
        raise wrong_type("muon_groups: adamw", adamw, "a list of names, such as ['head']")
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    excluded = _at_the_ends(model) | {id(one) for name in adamw for one in _named(model, name)}
    hidden = [one for name, one in trained.items() if _is_matrix(name, one) and id(one) not in excluded]
    if not hidden:
        raise ConfigError(
            "muon_groups: the model has no trainable weight [out, in] beside embeddings, its last one and those in "
            "`adamw`, so there is nothing for Muon to train. Use AdamW alone."
        )
    if any(map(is_sharded, hidden)):
        raise Unsupported(
            "muon_groups: torch.optim.Muon orthogonalizes whole matrices and does not know shards. Train with AdamW, "
            "or with DDP."
        )
    chosen = set(map(id, hidden))
    return hidden, [parameter for parameter in trained.values() if id(parameter) not in chosen]


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and name.endswith("weight")


def _at_the_ends(model: nn.Module) -> set[int]:
    """Return the ids of embeddings and heads; a tied head is the last name of an embedding."""
    embeddings = [one.weight for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    matrices = [one for name, one in model.named_parameters(remove_duplicate=False) if _is_matrix(name, one)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [*matrices[-1:], *(head.parameters() if isinstance(head, nn.Module) else ())]
    return {*map(id, embeddings), *map(id, heads)}


def _named(model: nn.Module, name: str) -> list[nn.Parameter]:
    """Return the parameter of this name, or those of the module."""
    found = [one for path, one in model.named_parameters(remove_duplicate=False) if f"{path}.".startswith(f"{name}.")]
    if not found:
        raise ConfigError(f"muon_groups: the model has no parameter and no module {name!r}, which `adamw` names.")
    return found
