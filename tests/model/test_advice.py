"""How a model's files advise to sample from it."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from model.advice import GENERATION_CONFIG, advice_of_directory, advice_of_gguf
from model.errors import UnsupportedModel
from model.gguf_file import GgufFile
from model.load import open_model
from model.source import resolve


def test_a_directory_without_a_generation_config(tmp_path: Path) -> None:
    assert advice_of_directory(tmp_path) == {}


def test_only_sampling_fields_that_are_given(tmp_path: Path) -> None:
    text = '{"temperature": 0.6, "top_k": 20, "top_p": null, "eos_token_id": 2, "max_new_tokens": 9}'
    (tmp_path / GENERATION_CONFIG).write_text(text)
    assert advice_of_directory(tmp_path) == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("text", ["[]", "{", "\ufeff", "[" * 10_000])
def test_a_file_that_is_no_object_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / GENERATION_CONFIG).write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedModel, match=GENERATION_CONFIG):
        advice_of_directory(tmp_path)


def test_gguf_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_float32("general.sampling.penalty_repeat", 1.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert advice_of_gguf(GgufFile(path)) == {"temperature": 0.5, "top_k": 40, "repetition_penalty": 1.5}


def test_the_default_model_follows_its_makers_advice() -> None:
    assert open_model(resolve(None)).advice == {"temperature": 0.2, "top_p": 0.9}
