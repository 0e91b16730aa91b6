"""Text to token ids by a tokenizer of the tokenizers library: in the server for short texts, and in another process for
long ones (server/text/worker.py). It imports nothing large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.special_text import SpecialText

NOT_UNICODE = "The text is not valid Unicode (it holds half a surrogate pair)."


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """What another process needs to encode texts as this one does: plain data. `backend` is the tokenizer as JSON;
    `special_texts` are by id."""

    backend: str
    bos_token_id: int | None
    special_texts: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """A text, as a prompt (`add_special_tokens`) or as a chat template wrote it; `mark` is that of a Rendered.

    With `keep` only the last so many tokens are wanted; with `limit` none where they are more than that.
    """

    text: str
    add_special_tokens: bool = True
    mark: str | None = None
    keep: int | None = None
    limit: int | None = None
    with_offsets: bool = False


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text of `total` tokens. `ids` are those that were wanted, and `offsets` where in the text (characters) each of
    them begins."""

    total: int
    ids: list[int]
    offsets: list[int]


class TextEncoder:
    """Read-only once made, so threads may share it."""

    def __init__(self, backend: Any, bos_token_id: int | None, special_texts: Mapping[int, str]) -> None:
        self._backend = backend
        self._bos_token_id = bos_token_id
        self._special_texts = special_texts
        self._special = SpecialText(backend, special_texts)

    @classmethod
    def load(cls, source: EncoderSource) -> TextEncoder:
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(source.backend), source.bos_token_id, source.special_texts)

    def source(self) -> EncoderSource:
        return EncoderSource(str(self._backend.to_str()), self._bos_token_id, self._special_texts)

    def encode(self, job: EncodeJob) -> Encoded:
        """Raises TypeError or UnicodeError where the text is no valid Unicode."""
        if job.mark is not None:
            return wanted(job, self._special.encode(job.text, job.mark), [])
        # As a batch of one: `encode` holds the interpreter's lock all the while. Offsets take time and memory.
        encode = self._backend.encode_batch if job.with_offsets else self._backend.encode_batch_fast
        (encoding,) = encode([job.text], add_special_tokens=job.add_special_tokens)
        ids = encoding.ids
        offsets = [start for start, _ in encoding.offsets] if job.with_offsets else []
        bos = self._bos_token_id
        if job.add_special_tokens and bos is not None and ids[:2] == [bos, bos]:  # the text begins with one of its own
            ids, offsets = ids[1:], offsets[1:]
        return wanted(job, ids, offsets)

    def names(self, ids: list[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return [str(self._backend.id_to_token(token_id) or "") for token_id in ids]


def wanted(job: EncodeJob, ids: list[int], offsets: list[int]) -> Encoded:
    total = len(ids)
    if job.keep is not None:
        ids, offsets = ids[-job.keep :], offsets[-job.keep :]
    return Encoded(total, [], []) if job.limit is not None and len(ids) > job.limit else Encoded(total, ids, offsets)
