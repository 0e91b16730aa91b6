"""Where a Hugging Face checkpoint keeps each of the network's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable

from model.config import ModelConfig
from model.tensors import expected_tensors

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_PREFIX = "model."
_LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,9})\.")
_COMPUTED = re.compile(r"(?:model\.)?(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def count_layers(names: Iterable[str]) -> int:
    """Layers that have tensors, whatever their numbers are."""
    return len({match[1] for name in names if (match := _LAYER.match(name))})


def stored_names(stored: Iterable[str], config: ModelConfig) -> dict[str, str]:
    """The network's name of a tensor -> its name in the files, for each that is there.

    As transformers reads them: a checkpoint of the bare decoder lacks the prefix `model.`, and a tied embedding may be
    there under the head's name only. A head that is there beside a tied embedding is in the result.
    """
    present = set(stored)
    wanted = [*expected_tensors(config), HEAD]
    found = {}
    for name in wanted:
        bare = name.removeprefix(_PREFIX)
        if name in present or bare in present:
            found[name] = name if name in present else bare
    if config.tie_embeddings and HEAD in found and EMBEDDING not in found:
        found[EMBEDDING] = found.pop(HEAD)
    return found


def is_computed(name: str) -> bool:
    """Whether old checkpoints carry the tensor though it follows from the config."""
    return _COMPUTED.fullmatch(name) is not None
