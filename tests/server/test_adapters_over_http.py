"""LoRA adapters over HTTP, on a real engine: each answers as a server of its own would, in any order and company."""

from __future__ import annotations

import itertools
import json
import random
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from server.serve import ServeError, list_adapters
from server.state import ServerSettings
from tests.server.real import RealServer, serve_real

PROMPT = random.Random("adapters").choices(range(10, 250), k=128)
NAMES = ("tiny", "x", "y")
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(chat_model: Path, path: Path, seed: int) -> Path:
    """A random LoRA adapter, by peft, large enough to change what the model says."""
    base = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft still asks transformers by a deprecated name
        model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=PROJECTIONS))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def adapters(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("loras")
    return {name: save_adapter(chat_model, folder / name, seed) for seed, name in enumerate(("x", "y", "z"), start=1)}


@pytest.fixture(scope="module")
def expected(chat_model: Path, adapters: dict[str, Path]) -> dict[str, Any]:
    """What fresh servers say: text and prompt logprobs, by the name of the model."""
    said = {}
    for name in (*NAMES, "z"):
        mine = {name: adapters[name]} if name in adapters else {}
        with serve_real(chat_model, adapters=mine) as server:
            answer = server.complete(PROMPT, 24, model=name, logprobs=5)
            assert answer["model"] == name
            said[name] = answer["choices"][0]
    assert len({choice["text"] for choice in said.values()}) == 4
    return said


@pytest.fixture(scope="module")
def shared(chat_model: Path, adapters: dict[str, Path]) -> Iterator[RealServer]:
    with serve_real(chat_model, adapters={name: adapters[name] for name in ("x", "y")}) as running:
        yield running


@pytest.fixture
def server(shared: RealServer) -> RealServer:
    """With nothing in its cache."""
    shared.post("/v1/cache/invalidate", all=True)
    return shared


def ask(server: RealServer, name: str, **extra: Any) -> Any:
    return server.complete(PROMPT, 24, model=name, logprobs=5, **extra)


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_in_any_order(server: RealServer, expected: dict[str, Any], order: tuple[str, ...]) -> None:
    for cached in (0, 127):
        for name in order:
            answer = ask(server, name)
            assert answer["choices"][0] == expected[name]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_all_at_once(server: RealServer, expected: dict[str, Any]) -> None:
    names = random.Random(3).sample(NAMES * 5, k=15)
    for _ in range(2):
        with ThreadPoolExecutor(15) as pool:
            answers = list(pool.map(lambda name: ask(server, name), names))
        assert [answer["choices"][0] for answer in answers] == [expected[name] for name in names]


def test_the_plan_names_the_reason(server: RealServer) -> None:
    prompt = PROMPT[::-1]  # one that was not cached, and then invalidated, under the other adapter
    server.complete(prompt, model="x")
    plan = server.plan(prompt, model="y")
    assert plan["computed"] == [[0, 128]] and {block["reason"] for block in plan["blocks"]} == {"other_adapter"}
    assert server.plan(prompt, model="x")["computed"] == [[127, 128]]


def test_a_salt_is_not_an_adapter_of_that_name(server: RealServer) -> None:
    assert server.cached(PROMPT, model="x") == 0
    assert server.cached(PROMPT, cache_salt="x") == 0
    assert server.cached(PROMPT, model="x", cache_salt="x") == 0
    assert server.cached(PROMPT, model="x") == server.cached(PROMPT, cache_salt="x") == 127


def test_an_adapters_blocks_alone_are_dropped(server: RealServer) -> None:
    for name in NAMES:
        ask(server, name)
    assert server.post("/v1/cache/drop", model="x", prompt=PROMPT, blocks=[2])["blocks"] == 1
    assert [server.cached(PROMPT, model=name) for name in NAMES] == [127, 111, 127]
    assert server.post("/v1/cache/invalidate", adapter="x")["blocks"] >= 8
    assert [server.cached(PROMPT, model=name) for name in NAMES] == [127, 0, 127]


def test_other_weights_under_an_old_name(chat_model: Path, adapters: dict[str, Path], expected: dict[str, Any]) -> None:
    with serve_real(chat_model, adapters={"a": adapters["x"]}) as server:
        assert ask(server, "a")["choices"][0] == expected["x"]
        begun = threading.Event()
        text = ""

        def listen() -> None:
            """A stream that began on the old weights, and ends on them."""
            nonlocal text
            body = {"model": "a", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}) as response:
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                        begun.set()

        thread = threading.Thread(target=listen)
        thread.start()
        assert begun.wait(20)
        load(server, "a", adapters["y"])
        thread.join()
        assert text == expected["x"]["text"]
        plan = server.plan(PROMPT, model="a")
        assert {block["reason"] for block in plan["blocks"]} == {"other_model_version"}
        answer = ask(server, "a")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["choices"][0] == expected["y"]
        load(server, "a", adapters["x"])  # what was there before is still true, and found
        assert server.cached(PROMPT, model="a") == 127
        assert ask(server, "a")["choices"][0] == expected["x"]


def load(server: RealServer, name: str, path: Path) -> None:
    response = httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})
    assert (response.status_code, response.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")


def test_loading_and_unloading(
    chat_model: Path, adapters: dict[str, Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    with serve_real(chat_model) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        load(server, "z", adapters["z"])
        cards = {card.id: card.model_extra or {} for card in client.models.list()}
        assert list(cards) == ["tiny", "z"]
        assert cards["z"]["parent"] == "tiny" and cards["z"]["root"] == str(adapters["z"])
        answer = client.completions.create(model="z", prompt=PROMPT, max_tokens=24, temperature=0)
        assert answer.choices[0].text == expected["z"]["text"]
        body = {"lora_name": "z", "lora_path": str(adapters["z"])}
        again = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body)
        assert again.status_code == 400 and "already been loaded" in again.json()["error"]["message"]
        for path in (tmp_path, tmp_path / "nothing"):
            bad = httpx.post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "w", "lora_path": str(path)})
            assert bad.status_code == 400 and bad.json()["error"]["param"] == "lora_path"
            assert str(path) in bad.json()["error"]["message"]
        gone = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "z"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'z' removed successfully.")
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="z", prompt=PROMPT)
        assert [card.id for card in client.models.list()] == ["tiny"]
        load(server, "z", adapters["z"])
        assert server.cached(PROMPT, model="z") == 127


def test_chat_and_logprobs_of_an_adapter(server: RealServer, chat_model: Path, adapters: dict[str, Path]) -> None:
    from peft import PeftModel

    answer = server.complete(PROMPT, model="x", prompt_logprobs=0)
    base = AutoModelForCausalLM.from_pretrained(chat_model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        merged = PeftModel.from_pretrained(base, str(adapters["x"])).merge_and_unload().eval()
    with torch.no_grad():
        rows = merged(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    got = [
        entry[str(token)]["logprob"]
        for entry, token in zip(answer["choices"][0]["prompt_logprobs"][1:], PROMPT[1:], strict=True)
    ]
    assert got == pytest.approx([float(rows[at, token]) for at, token in enumerate(PROMPT[1:])], abs=1e-4)
    messages = [{"role": "user", "content": "hello"}]
    texts = {
        server.post("/v1/chat/completions", model=name, messages=messages, max_tokens=12, temperature=0)["choices"][0][
            "message"
        ]["content"]
        for name in NAMES
    }
    assert len(texts) == 3


def test_an_adapter_with_the_models_own_name_is_refused() -> None:
    class Engine:
        def call(self, command: object, kind: type) -> object:
            from scheduler.commands import AdapterInfo

            return (AdapterInfo("tiny", "/p", 8, "00"),)

    with pytest.raises(ServeError, match="name of the model itself"):
        list_adapters(Engine(), ServerSettings("tiny").model_name)  # type: ignore[arg-type]
