"""Stop strings and streams over texts that are dictated: the network's next token is a fixed function of its last.

The checkpoint's layers add nothing (their output projections are zero), its head is its embedding moved by one, so
after token i comes token i + 1. What token i stands for is told to the server's tokenizer for each text: the tokens of
that text in a real vocabulary, of whole words, of bytes of characters, of SentencePiece's pieces and its byte tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from scheduler.config import EngineConfig
from scheduler.engine_thread import EngineThread
from server.async_engine import AsyncEngine
from server.state import ServerSettings
from server.text.encoding import EncodeJob
from server.tokenizer import Tokenizer
from tests.server.harness import listening
from tests.server.test_stop import cut_at_stop
from tests.server.tiny_tokenizers import byte_level, sentencepiece

VOCAB = 512
EOS = VOCAB - 1
OTHER_EOS = 5  # which only the generation's configuration knows
PIECES = [
    "a",
    "b",
    "ab",
    " ",
    "  ",
    "\n",
    "the",
    " quick",
    "é",
    "e\u0301",
    "中",
    "文字",
    "😀",
    "👩\u200d👩\u200d👧",
    "\u0e01\u0e33",
]
texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=14).map("".join)


def save_counting_model(path: Path) -> None:
    """After token i the likeliest is i + 1."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config).eval()
    directions = torch.nn.functional.normalize(
        torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(0)), dim=1
    )
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(directions)
        model.lm_head.weight.copy_(directions.roll(1, 0))
    model.generation_config.eos_token_id = [EOS, OTHER_EOS]
    model.save_pretrained(path)


class Dictation:
    """A tokenizer whose token i is the i-th of a text's tokens in another tokenizer; EOS follows the last."""

    bos_token_id = None
    has_chat_template = False

    def __init__(self) -> None:
        self.special_token_ids = frozenset({EOS})
        self.strips_leading_space = False
        self._pieces: list[bytes] = []
        self.text = ""

    def dictate(self, text: str, tokenizer: Tokenizer, cut: int) -> list[int]:
        """The prompt after which `text` comes, and then EOS; `cut` tokens are left out at its end, within a character
        perhaps. `text` is what is really dictated then."""
        ids = tokenizer.encode(text, add_special_tokens=False)
        ids = ids[: max(len(ids) - cut, 1)]
        self.text = tokenizer.decode(ids, skip_special_tokens=False)
        self.strips_leading_space = tokenizer.strips_leading_space
        self._pieces = [tokenizer.token_bytes(token_id) for token_id in ids]
        return [EOS - len(ids) - 1]

    def token_bytes(self, token_id: int) -> bytes:
        index = token_id - EOS + len(self._pieces)
        return b"</s>" if token_id == EOS else self._pieces[index] if index >= 0 else b""

    def encode_job(self, job: EncodeJob) -> Any:
        raise NotImplementedError


class Server:
    def __init__(self, url: str, dictation: Dictation) -> None:
        self.url = url
        self.dictation = dictation
        self.client = httpx.Client(base_url=url, timeout=30)

    def whole(self, body: dict[str, Any]) -> tuple[str, str, str | None]:
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        return choice["text"], choice["finish_reason"], choice["stop_reason"]

    def streamed(self, body: dict[str, Any]) -> tuple[list[str], str, str | None]:
        with self.client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        return [choice["text"] for choice in choices], choices[-1]["finish_reason"], choices[-1]["stop_reason"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("counting")
    save_counting_model(path)
    config = EngineConfig(str(path), dtype="float32", device="cpu", num_blocks=64, scrub_rate=0.0, threads=1)
    bridge = AsyncEngine(lambda deliver: EngineThread(config, deliver, progress=False))
    dictation = Dictation()
    with listening(bridge, bridge.start(), dictation, ServerSettings("counting")) as (url, _):
        made = Server(url, dictation)
        with made.client:
            yield made


def stops_of(text: str, places: list[tuple[int, int]], others: list[str]) -> list[str]:
    """Some pieces of the text, wherever they begin and end, and some that may not occur in it."""
    size = len(text)
    found = [text[start % size : start % size + length] for start, length in places]
    return list(dict.fromkeys([*found, *others]))


TOKENIZERS = [Tokenizer(byte_level()), Tokenizer(sentencepiece())]


@settings(deadline=None, max_examples=40)
@given(
    text=texts,
    kind=st.sampled_from([0, 1]),
    cut=st.sampled_from([0, 0, 1, 2]),
    places=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=2),
    others=st.lists(st.text("ab 中é😀\u0301", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
)
def test_streamed_is_whole_is_cut_at_the_first_stop(
    server: Server,
    text: str,
    kind: int,
    cut: int,
    places: list[tuple[int, int]],
    others: list[str],
    include: bool,
) -> None:
    prompt = server.dictation.dictate(text, TOKENIZERS[kind], cut)
    said = server.dictation.text
    stops = stops_of(said, places, others) if said else others
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 400,
        "temperature": 0,
        "include_stop_str_in_output": include,
    }
    server.dictation.strips_leading_space = False  # a completion goes on from its prompt: its first space is its own
    if TOKENIZERS[kind].strips_leading_space:
        said = " " + said
    expected, matched = cut_at_stop(said, stops, include)
    if stops:
        body["stop"] = stops
    pieces, reason, stopped_by = server.streamed(body)
    assert ("".join(pieces), reason, stopped_by) == (expected, "stop", matched)
    assert server.whole(body) == (expected, "stop", matched)
    whole = "".join(pieces)
    assert "\ufffd" not in whole or cut, "half a character was sent"


def test_every_eos_ends_a_text(server: Server) -> None:
    server.dictation._pieces = [b"."] * EOS
    body = {"prompt": [OTHER_EOS - 3], "max_tokens": 9, "temperature": 0}
    assert server.whole(body) == ("..", "stop", None)
    assert server.whole(body | {"ignore_eos": True}) == ("." * 9, "length", None)
    assert server.whole(body | {"min_tokens": 6})[0] != ".."
