"""Text to token ids and back, for one model. transformers makes the tokenizer; what streams need is added here.

    TokenizerError
    ├── NoChatTemplate      the model came without one, so chat messages have no defined spelling
    ├── ChatTemplateError   the template does not accept these messages
    └── TextTooLong         the text has more tokens than were allowed for; it was not encoded

Everything is read-only after `load`, so threads may share one Tokenizer.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from server.text.chat_template import NO_TEMPLATE, ChatTemplate, Forms, Rendered, TemplateFault, TemplateSource
from server.text.encoding import NOT_UNICODE, Encoded, EncodeJob, TextEncoder
from server.text_bound import text_bound

_log = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_alphabet: Any = bytes_to_unicode  # transformers ships no types for it
_BYTE_OF: dict[str, int] = {char: byte for byte, char in _alphabet().items()}

# What llama.cpp calls the splits that transformers' GGUF reader leaves at GPT-2's (`tokenizer.ggml.pre`).
_SPLIT_LIKE_GPT2 = {"gpt-2", "jais", "mpt", "olmo", "phi-2"}
_SPLIT_SINGLE_DIGITS = {"codeshell", "exaone", "minerva-7b", "refact", "smollm", "starcoder"}
# Vocabularies of Qwen's compose characters first; those of Llama 3 and Tekken take a word that they have whole, and
# begin a text with BOS if nothing is said of it (llama.cpp does as well).
_COMPOSING = {"qwen2", "qwen35"}
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}


class TokenizerError(Exception):
    """The tokenizer cannot be loaded, or this text cannot be encoded."""


class NoChatTemplate(TokenizerError):
    """The model has no chat template."""


class ChatTemplateError(TokenizerError):
    """The chat template refused the messages; the message is the template's own."""


class TextTooLong(TokenizerError):
    """`least` is the fewest tokens that the text can have."""

    def __init__(self, least: int) -> None:
        super().__init__(f"The text has at least {least} tokens.")
        self.least = least


class Tokenizer:
    """One model's tokenizer.

    `vocab_size` counts the ids that have a token, which may be fewer than the rows of the model's embedding.
    `strips_leading_space` says that the first token of a text loses a leading space (SentencePiece).
    """

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(f"{type(tokenizer).__name__} is not backed by the tokenizers library.")
        # Set once here: transformers would set them per call, which is a write shared between threads.
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer, self._backend = tokenizer, backend
        self.vocab_size: int = len(tokenizer)
        self.bos_token_id: int | None = tokenizer.bos_token_id
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.has_chat_template = bool(tokenizer.chat_template)
        self.takes_tools = bool(re.search(r"\btools\b", str(tokenizer.chat_template)))  # its template tells of them
        added = tokenizer.added_tokens_decoder
        self.special_token_ids = frozenset(tokenizer.all_special_ids) | {id for id in added if added[id].special}
        self._added_text = {id: token.content for id, token in added.items()}
        texts = {id: text for id in self.special_token_ids if (text := backend.id_to_token(id)) is not None}
        self._special_texts = texts
        self.encoder = TextEncoder(backend, self.bos_token_id, texts)
        self._bound = text_bound(backend, added)
        self._decoders = _decoder_types(backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self._anchor = self._find_anchor()
        self.strips_leading_space = self._finds_stripped_space()

    @classmethod
    def load(cls, model_path: str, chat_template: str | None = None) -> Tokenizer:
        """From a .gguf file's metadata, or from a Hugging Face directory. `chat_template` takes the place of the
        model's own.

        Raises:
            TokenizerError: there is no usable tokenizer.
        """
        path = Path(model_path)
        try:
            if path.is_file():
                tokenizer = _from_gguf(path)
            else:
                tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            if chat_template is not None:
                tokenizer.chat_template = chat_template
            return cls(tokenizer)
        except TokenizerError:
            raise
        except Exception as error:  # damaged files surface as many types, none of them documented
            raise TokenizerError(f"The tokenizer of {model_path} cannot be loaded: {error}") from error

    def to_json(self) -> str:
        """As the tokenizers library writes it."""
        return str(self._backend.to_str())

    @property
    def template_source(self) -> TemplateSource | None:
        """What renders chats in another process (server/text); None for a model without a template."""
        return TemplateSource.of(self._tokenizer, list(self._special_texts.values()))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens as the model's tokenizer adds them, but one BOS at most."""
        return self.encode_job(EncodeJob(text, add_special_tokens)).ids

    def encode_job(self, job: EncodeJob) -> Encoded:
        """In this process, so for short texts. Raises TokenizerError."""
        try:
            return self.encoder.encode(job)
        except (TypeError, UnicodeError) as error:
            raise TokenizerError(NOT_UNICODE) from error

    def refuse_long(self, text: str, max_tokens: int | None) -> None:
        """Raises TextTooLong for a text so long that it must have more than `max_tokens`; a shorter one may as well."""
        if max_tokens is None or self._bound is None or len(text) <= max_tokens:
            return
        least = self._bound.least_tokens(text)
        if least > max_tokens:
            raise TextTooLong(least)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **kwargs: Any) -> str:
        """The prompt's text by the model's chat template. `kwargs` are the template's variables, and `tools`. In this
        process, so for templates that are known to end.

        Raises:
            NoChatTemplate: the model has none.
            ChatTemplateError: the template does not accept the messages.
        """
        rendered = self._render(messages, kwargs)
        return rendered.text if rendered.mark is None else rendered.text.replace(rendered.mark, "")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **kwargs: Any) -> list[int]:
        """Token ids of `render_chat`. The template writes its own BOS, so none is added, and what spells a special
        token in `messages` or `kwargs` is no special token. Raises what `render_chat` does."""
        rendered = self._render(messages, kwargs)
        return self.encode_job(EncodeJob(rendered.text, add_special_tokens=False, mark=rendered.mark)).ids

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> Rendered:
        source = self.template_source
        if source is None:
            raise NoChatTemplate(NO_TEMPLATE)
        try:
            return ChatTemplate(source).render(
                [dict(message) for message in messages], {"add_generation_prompt": True, **variables}, Forms()
            )
        except TemplateFault as error:
            raise ChatTemplateError(str(error)) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of whole ids; bytes that are no UTF-8 become U+FFFD, each as few bytes as can be told apart.

        Equal to what a Detokenizer gives piece by piece. It is transformers' text too, but for byte tokens of
        SentencePiece that form no UTF-8: there the characters around the broken one are kept.
        """
        skipped = self.special_token_ids if skip_special_tokens else ()
        joined = b"".join(self.token_bytes(token_id) for token_id in token_ids if token_id not in skipped)
        if self.strips_leading_space:
            joined = joined.removeprefix(b" ")
        return codecs.decode(joined, "utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for within a text, which may be part of a character; empty for ids without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """The token by itself, with U+FFFD where it holds part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it, such as "Ġthe"; empty for ids without one."""
        return str(self._backend.id_to_token(token_id) or "")

    def tokens(self) -> tuple[bytes, ...]:
        """`token_bytes` of every id up to the largest that has a token. Takes seconds for a large vocabulary."""
        size = max(self._backend.get_vocab().values()) + 1
        known = [self._spelled_bytes(token_id) for token_id in range(size)]
        others = [token_id for token_id, spelled in enumerate(known) if spelled is None]
        pairs = [[self._anchor], *([self._anchor, token_id] for token_id in others)]
        before, *texts = self._backend.decode_batch(pairs, skip_special_tokens=False)
        decoded = dict(zip(others, (text[len(before) :].encode() for text in texts), strict=True))
        return tuple(decoded[token_id] if spelled is None else spelled for token_id, spelled in enumerate(known))

    def _compute_bytes(self, token_id: int) -> bytes:
        spelled = self._spelled_bytes(token_id)
        if spelled is not None:
            return spelled
        # After a token of plain text, so that nothing of this one is stripped as the beginning of a text.
        before = self._decode_raw([self._anchor])
        return self._decode_raw([self._anchor, token_id])[len(before) :].encode()

    def _spelled_bytes(self, token_id: int) -> bytes | None:
        """The token's bytes where its spelling tells them; None where only the decoder does."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            if token_id in self._added_text or any(char not in _BYTE_OF for char in token):
                return str(self._added_text.get(token_id, token)).encode()
            return bytes(_BYTE_OF[char] for char in token)
        if "ByteFallback" in self._decoders and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return None

    def _decode_raw(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def _find_anchor(self) -> int:
        ids = self._backend.encode("a", add_special_tokens=False).ids
        if not ids:
            raise TokenizerError("The tokenizer has no token for a plain letter.")
        return int(ids[-1])

    def _finds_stripped_space(self) -> bool:
        if "ByteLevel" in self._decoders:
            return False
        vocab: dict[str, int] = self._backend.get_vocab()
        probe = next((id for token, id in vocab.items() if token.startswith("▁") and token.strip("▁")), None)
        return probe is not None and self._decode_raw([probe]).encode() == self.token_bytes(probe)[1:]


def _decoder_types(decoder: Any) -> set[str]:
    """The kinds of steps a decoder of the tokenizers library is made of."""
    if decoder is None:
        return set()
    state = json.loads(decoder.__getstate__())
    return {str(step["type"]) for step in (state, *state.get("decoders", ()))}


def _from_gguf(path: Path) -> Any:
    """The tokenizer that a GGUF file's metadata describes.

    The steps are those of `from_pretrained(gguf_file=...)`, without its reading the file's header several times over,
    and with the splits that it does not know.
    """
    architecture, description, settings = get_gguf_tokenizer(str(path))
    backend, extra = convert_gguf_tokenizer(architecture, description)
    split = description.get("pre_tokenizer_type", "")
    if split in _COMPOSING:
        backend.normalizer = normalizers.NFC()
    elif split in _WHOLE_WORDS:
        model: Any = backend.model
        model.ignore_merges = True
        settings.setdefault("add_bos_token", True)
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=backend, **settings, **extra)
    if description.get("tokenizer_type") != "gpt2" or split in GGUF_PRE_TOKENIZER_SPLITS:
        return tokenizer
    if split in _SPLIT_SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif split not in _SPLIT_LIKE_GPT2:
        _log.warning("%s: the text split %r is not known; GPT-2's is used, which may give other tokens.", path, split)
    return tokenizer
