"""A real HTTP server around a real engine on a tiny random network, with a tiny tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedModel

from scheduler.commands import AdapterInfo, ListAdapters
from scheduler.config import EngineConfig
from scheduler.engine_thread import EngineThread
from server.async_engine import AsyncEngine
from server.state import ServerSettings
from server.tokenizer import Tokenizer
from tests.model.tiny import build_tiny
from tests.server.harness import listening
from tests.server.tiny_tokenizers import byte_level

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"


def save_chat_model(path: Path, seed: int = 0, max_model_len: int = 512, *, tokenizer: Any = None) -> PreTrainedModel:
    """A tiny Llama 3 over a byte-level tokenizer, or another, in a directory of its own."""
    tokenizer = tokenizer or byte_level()
    torch.manual_seed(seed)
    model: Any = build_tiny("llama3", seed)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.max_position_embeddings = max_model_len
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return model  # type: ignore[no-any-return]


@dataclass
class RealServer:
    url: str

    def post(self, path: str, **body: Any) -> Any:
        """The answer's JSON; an error is the test's."""
        response = httpx.post(self.url + path, json=body, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, max_tokens: int = 1, **extra: Any) -> Any:
        """A greedy completion of exactly so many tokens."""
        fixed = {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens}
        return self.post("/v1/completions", prompt=prompt, **fixed, **extra)

    def cached(self, prompt: Any, **extra: Any) -> int:
        """How many of a prompt's tokens a request for one token finds in the cache."""
        return int(self.complete(prompt, **extra)["usage"]["prompt_tokens_details"]["cached_tokens"])

    def plan(self, prompt: Any, **extra: Any) -> Any:
        return self.post("/v1/cache/plan", prompt=prompt, **extra)


@contextmanager
def serve_real(
    model: Path,
    settings: ServerSettings | None = None,
    adapters: dict[str, Path] | None = None,
    *,
    num_blocks: int = 256,
    block_size: int = 16,
    tokenizer: Tokenizer | None = None,
) -> Iterator[RealServer]:
    """A server in float32, by the model's tokenizer or another; it and all its threads have ended when the block is
    left."""
    config = EngineConfig(
        str(model),
        dtype="float32",
        device="cpu",
        num_blocks=num_blocks,
        block_size=block_size,
        scrub_rate=0.0,
        adapters=tuple((name, str(path)) for name, path in (adapters or {}).items()),
        threads=1,
    )
    bridge = AsyncEngine(lambda deliver: EngineThread(config, deliver, progress=False))
    info = bridge.start()
    loaded: tuple[AdapterInfo, ...] = bridge.call(ListAdapters(), tuple)
    tokenizer = tokenizer or Tokenizer.load(info.model_path)
    with listening(bridge, info, tokenizer, settings or ServerSettings("tiny"), loaded) as (url, _):
        yield RealServer(url)
