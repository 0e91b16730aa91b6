"""Loading a Hugging Face directory: every tensor as transformers saved it, and clear words for everything else."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from model.config import ModelConfig, RopeConfig
from model.digest import CHUNK_BYTES, WeightsDigest, digest_model, digest_weights
from model.errors import BadWeights, UnsupportedModel
from model.load import LoadedModel, load_model
from model.source import ModelSource, SourceKind
from tests.model.tiny_checkpoints import FAMILIES, make_network, save_hf
from tests.twins import xxh3_twins

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(ModelSource(path, SourceKind.HF, path.name), dtype=dtype, device=CPU, progress=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A saved tiny Llama whose only weights file is model.safetensors."""
    return save_hf(make_network("llama", tie_word_embeddings=False), tmp_path / "checkpoint")


def rewrite(path: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(path / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", [None, "100KB"])
def test_every_tensor_equals_what_was_saved(family: str, tied: bool, shard: str | None, tmp_path: Path) -> None:
    network = make_network(family, tie_word_embeddings=tied)
    path = save_hf(network, tmp_path, **({"max_shard_size": shard} if shard else {}))
    assert (path / "model.safetensors.index.json").exists() == (shard is not None)
    expected = network.state_dict()
    if tied:
        del expected["lm_head.weight"]
    loaded = load(path)
    assert loaded.weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(loaded.weights[name], tensor, rtol=0, atol=0)
    assert loaded.config.tie_embeddings == tied


def test_biases_are_loaded(tmp_path: Path) -> None:
    network = make_network("llama", attention_bias=True, mlp_bias=True)
    loaded = load(save_hf(network, tmp_path))
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        key = f"model.layers.1.{name}.bias"
        torch.testing.assert_close(loaded.weights[key], network.state_dict()[key], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tensors_are_converted(dtype: torch.dtype, checkpoint: Path) -> None:
    whole, half = load(checkpoint), load(checkpoint, dtype)
    for name, tensor in whole.weights.items():
        assert torch.equal(half.weights[name], tensor.to(dtype))


def test_loaded_tensors_do_not_depend_on_the_file_any_more(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    before = {name: tensor.clone() for name, tensor in loaded.weights.items()}
    file = checkpoint / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.write(b"\xff" * size)
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.weights.items())


def test_a_single_file_of_another_name(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "weights.safetensors")
    load(checkpoint)
    shutil.copy(checkpoint / "weights.safetensors", checkpoint / "copy.safetensors")
    with pytest.raises(BadWeights, match=r"copy\.safetensors, weights\.safetensors"):
        load(checkpoint)


def test_missing_and_misshapen_tensors_are_all_named(checkpoint: Path) -> None:
    rewrite(
        checkpoint,
        {
            "model.norm.weight": None,
            "lm_head.weight": None,
            "model.layers.0.mlp.up_proj.weight": torch.zeros(64, 256),
        },
    )
    with pytest.raises(BadWeights) as caught:
        load(checkpoint)
    told = str(caught.value)
    assert "missing tensors: lm_head.weight, model.norm.weight" in told
    assert "model.layers.0.mlp.up_proj.weight is [64, 256], expected [256, 64]" in told


def test_integer_tensors_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, {"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match="model.norm.weight is of type I8"):
        load(checkpoint)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_cut_off_anywhere_is_named(keep: int, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BadWeights, match=r"model\.safetensors is not a complete safetensors file"):
        load(checkpoint)


def test_a_pickle_under_a_safetensors_name_is_not_read(checkpoint: Path) -> None:
    torch.save({"a": torch.ones(1)}, checkpoint / "model.safetensors")
    with pytest.raises(BadWeights, match=r"model\.safetensors"):
        load(checkpoint)


class TestShards:
    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        return save_hf(make_network("llama", tie_word_embeddings=False), tmp_path / "sharded", max_shard_size="100KB")

    def edit_index(self, path: Path, name: str, shard: str | None) -> None:
        file = path / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
        file.write_text(json.dumps(index))

    def test_a_missing_shard(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("*.safetensors"))[1]
        shard.unlink()
        with pytest.raises(BadWeights, match=f"{shard.name} is missing"):
            load(sharded)

    def test_a_damaged_shard(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("*.safetensors"))[-1]
        shard.write_bytes(shard.read_bytes()[:-8])
        with pytest.raises(BadWeights, match=f"{shard.name} is not a complete"):
            load(sharded)

    def test_an_entry_without_a_tensor(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("*.safetensors"))[0].name
        self.edit_index(sharded, "model.layers.9.mlp.up_proj.weight", shard)
        with pytest.raises(BadWeights, match=r"not in the shard it names: model\.layers\.9\.mlp\.up_proj\.weight"):
            load(sharded)

    def test_an_entry_that_names_the_wrong_shard(self, sharded: Path) -> None:
        self.edit_index(sharded, "model.norm.weight", sorted(sharded.glob("*.safetensors"))[0].name)
        with pytest.raises(BadWeights, match=r"not in the shard it names: model\.norm\.weight"):
            load(sharded)

    def test_an_entry_that_leaves_the_directory(self, sharded: Path) -> None:
        self.edit_index(sharded, "model.norm.weight", "../other.safetensors")
        with pytest.raises(BadWeights, match=r"outside its directory"):
            load(sharded)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000])
    def test_a_broken_index(self, text: str, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").write_text(text)
        with pytest.raises(BadWeights, match=r"model\.safetensors\.index\.json is not an index"):
            load(sharded)


class TestDigest:
    CONFIG = ModelConfig("llama", 8, 4, 8, 1, 2, 1, 2, 1e-5, RopeConfig(), 64, True)

    def weights(self) -> dict[str, torch.Tensor]:
        return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}

    def test_it_is_256_bits_and_repeatable(self) -> None:
        assert len(digest_model(self.CONFIG, self.weights())) == 32
        backwards = dict(reversed(self.weights().items()))
        assert digest_model(self.CONFIG, self.weights()) == digest_model(self.CONFIG, backwards)

    @pytest.mark.parametrize(
        "change",
        [
            {"a": torch.arange(6.0).reshape(3, 2)},
            {"a": torch.arange(6.0).reshape(2, 3).double()},
            {"a": torch.arange(6).reshape(2, 3)},
            {"a": torch.tensor([[0.0, 1, 2], [3, 4, 5.0000005]])},
            {"a": torch.tensor([[-0.0, 1, 2], [3, 4, 5]])},
            {"b": torch.ones(4, dtype=torch.float16)},
            {"c": torch.ones(1)},
        ],
    )
    def test_every_part_of_a_tensor_counts(self, change: dict[str, torch.Tensor]) -> None:
        assert digest_model(self.CONFIG, self.weights()) != digest_model(self.CONFIG, {**self.weights(), **change})

    def test_names_count_and_may_not_be_exchanged(self) -> None:
        weights = self.weights()
        renamed = {"a2": weights["a"], "b": weights["b"]}
        exchanged = {"a": weights["b"], "b": weights["a"]}
        digests = {digest_model(self.CONFIG, tensors) for tensors in (weights, renamed, exchanged)}
        assert len(digests) == 3

    def test_weights_whose_xxh3_is_equal_have_different_digests(self) -> None:
        """Both were made from the public key of xxh3, by which weights were once known."""
        parts = [b"a", b"torch.uint8", b"(1234,)"]
        header = b"".join(len(part).to_bytes(8, "little") + part for part in parts) + bytes(8)
        twins = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in xxh3_twins(len(header))]
        assert len(str(tuple(twins[0].shape))) == len(parts[2])
        assert len({xxhash.xxh3_128_digest(header + bytes(twin.numpy())) for twin in twins}) == 1
        assert len({digest_weights({"a": twin}) for twin in twins}) == 2

    def test_each_byte_of_a_tensor_of_several_chunks_counts(self) -> None:
        tensor = torch.zeros(2 * CHUNK_BYTES + 7, dtype=torch.uint8)
        digests = {digest_weights({"a": tensor})}
        for place in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES, len(tensor) - 1):
            changed = tensor.clone()
            changed[place] = 1
            digests.add(digest_weights({"a": changed}))
        digests.add(digest_weights({"a": tensor[:CHUNK_BYTES], "b": tensor[CHUNK_BYTES:]}))
        assert len(digests) == 7

    def test_reading_waits_for_hashing_when_too_much_memory_is_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model.digest.MOST_BYTES_BEHIND", 100)
        waiting = threading.Event()
        weights = {name: torch.full((60,), ord(name), dtype=torch.uint8) for name in "abcd"}
        expected = digest_weights(weights)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(waiting.wait, 10)
            digest = WeightsDigest(pool)
            digest.add_tensor("a", weights["a"])
            threading.Timer(0.05, waiting.set).start()
            digest.add_tensor("b", weights["b"])
            assert waiting.is_set()
            for name in "cd":
                digest.add_tensor(name, weights[name])
            assert digest.result() == expected

    def test_every_config_value_counts(self) -> None:
        def other(value: object) -> object:
            if isinstance(value, bool):
                return not value
            if isinstance(value, int | float):
                return value + 1
            return {"llama": "mistral", "none": "linear", None: 7, (): (7,)}[value]  # type: ignore[index]

        ropes = [
            dataclasses.replace(
                self.CONFIG.rope,
                **{f.name: (1.0,) if f.name == "frequency_factors" else other(getattr(self.CONFIG.rope, f.name))},
            )
            for f in dataclasses.fields(RopeConfig)
        ]
        configs = [self.CONFIG, *(dataclasses.replace(self.CONFIG, rope=rope) for rope in ropes)]
        configs += [
            dataclasses.replace(self.CONFIG, **{f.name: other(getattr(self.CONFIG, f.name))})
            for f in dataclasses.fields(ModelConfig)
            if f.name != "rope"
        ]
        assert len({digest_model(config, self.weights()) for config in configs}) == len(configs)

    def test_the_same_model_elsewhere_has_the_same_digest_and_a_changed_weight_has_not(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        copy = Path(shutil.copytree(checkpoint, tmp_path / "elsewhere"))
        first = load(checkpoint)
        assert load(copy).digest == first.digest
        assert load(copy, torch.bfloat16).digest != first.digest
        norm = first.weights["model.norm.weight"].clone()
        norm[3] = torch.nextafter(norm[3], torch.tensor(2.0))
        rewrite(copy, {"model.norm.weight": norm})
        assert load(copy).digest != first.digest


def test_progress_is_shown_when_asked(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = ModelSource(checkpoint, SourceKind.HF, "tiny")
    load_model(source, dtype=torch.float32, device=CPU, progress=False)
    assert capfd.readouterr().err == ""
    load_model(source, dtype=torch.float32, device=CPU, progress=True)
    assert "Loading tiny: 100%" in capfd.readouterr().err
