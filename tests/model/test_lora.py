"""LoRA adapters against peft: the same logits, whichever way the adapter is configured; everything else is refused."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.errors import AdapterError
from model.lora import CONFIG, PICKLE, WEIGHTS, LoraAdapter, load_adapter
from model.network import Network
from tests.model.adapters import PROJECTIONS, rows_of, save_adapter
from tests.model.paged import CPU, PagedWorld, Span, config_of, dense, make_network, random_tokens
from tests.model.tiny import VOCAB_SIZE

TOLERANCE = 1e-4
FAMILIES = ["llama3", "qwen2", "qwen3"]
CONFIGS: dict[str, dict[str, Any]] = {
    "all projections": {},
    "rank-stabilized": {"use_rslora": True, "r": 7},
    "alpha that is no multiple": {"lora_alpha": 3, "r": 5},
    "some projections": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "one projection": {"target_modules": ["k_proj"], "r": 1},
    "full names": {"target_modules": ["model.layers.1.self_attn.q_proj", "layers.2.mlp.down_proj"]},
    "regular expression": {"target_modules": r"(?i).*layers\.[02]\..*(Q|o|gate)_proj"},
    "all linear": {"target_modules": "all-linear"},
    "exclude by name": {"target_modules": "all-linear", "exclude_modules": ["o_proj", "model.layers.0.mlp.up_proj"]},
    "exclude by expression": {"exclude_modules": r".*layers\.1\..*"},
    "some layers": {"layers_to_transform": [0, 2]},
    "the first layer": {"layers_to_transform": 0},
    "layers by pattern": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "layers by several patterns": {"layers_to_transform": [2], "layers_pattern": ["blocks", "layers"]},
    "rank pattern": {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 20, r"layers\.[02].*down_proj": 9}},
    "alpha pattern": {
        "alpha_pattern": {"model.layers.0.self_attn.q_proj": 1, "k_proj": 31, "(up|down)_proj": 5, "up_proj": 5}
    },
    "both patterns, rank-stabilized": {
        "use_rslora": True,
        "rank_pattern": {r"layers\.[12].*v_proj": 17},
        "alpha_pattern": {"v_proj": 40, r"self_attn\.[qk]_proj": 1},
    },
    "begun orthogonal, with dropout": {"init_lora_weights": "orthogonal", "lora_dropout": 0.5},
}


def load(path: Path, architecture: str = "llama3", dtype: torch.dtype = torch.float32) -> LoraAdapter:
    return load_adapter(path, config_of(architecture), dtype=dtype, device=CPU)


def whole(network: Network, tokens: Sequence[int], adapter: LoraAdapter | None) -> torch.Tensor:
    """One request, alone, in one pass, under an adapter. Logits [len(tokens), vocab_size]."""
    world = PagedWorld(network, [tokens])
    return run(world, [Span(0, 0, len(tokens))], [adapter])[0]


def run(world: PagedWorld, spans: list[Span], adapters: Sequence[LoraAdapter | None]) -> list[torch.Tensor]:
    """Logits of each span, `adapters` being those of the world's requests."""
    logits = world.runner.run(replace(world.inputs(spans), adapters=rows_of(spans, adapters)))
    return list(logits.split([span.end - span.start for span in spans]))


# -- the same logits as peft ------------------------------------------------------------------------------------------


def check_against_peft(architecture: str, path: Path, config: dict[str, Any]) -> None:
    tokens = random_tokens(random.Random(1), 90, VOCAB_SIZE)
    network = make_network(architecture)
    model = save_adapter(architecture, path, **config)
    logits = whole(network, tokens, load(path, architecture))
    with torch.inference_mode():
        unmerged = model(torch.tensor([tokens])).logits[0]
    merged_model = model.merge_and_unload()
    with torch.inference_mode():
        merged = merged_model(torch.tensor([tokens])).logits[0]
    assert torch.allclose(logits, unmerged, atol=TOLERANCE, rtol=0)
    assert torch.allclose(logits, merged, atol=TOLERANCE, rtol=0)
    assert (logits - dense(network, tokens)).abs().max() > 0.05  # else the adapter would not have mattered


@pytest.mark.parametrize("architecture", FAMILIES)
def test_logits_equal_peft(architecture: str, tmp_path: Path) -> None:
    check_against_peft(architecture, tmp_path, {})


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_each_value_means_what_it_means_in_peft(config: dict[str, Any], tmp_path: Path) -> None:
    check_against_peft("llama3", tmp_path, config)


def test_all_linear_in_the_file_leaves_the_head_alone(tmp_path: Path) -> None:
    save_adapter("llama3", tmp_path)
    before = load(tmp_path)
    edit_config(tmp_path, target_modules="all-linear")
    assert load(tmp_path).digest == before.digest


# -- bit for bit ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of the tiny Llama 3, the second of a few projections only."""
    paths = [tmp_path_factory.mktemp(name) for name in "xy"]
    save_adapter("llama3", paths[0], seed=1)
    save_adapter("llama3", paths[1], seed=2, r=3, use_rslora=True, target_modules=["v_proj", "down_proj"])
    return paths


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_base_and_two_adapters_in_one_step_equal_each_alone(two: list[Path], dtype: torch.dtype) -> None:
    rng = random.Random(2)
    network = make_network("llama3", dtype)
    x, y = (load(path, dtype=dtype) for path in two)
    adapters = [None, x, y, x, None]
    requests = [random_tokens(rng, length, VOCAB_SIZE) for length in (37, 50, 1, 16, 90)]
    together = run(
        PagedWorld(network, requests), [Span(n, 0, len(tokens)) for n, tokens in enumerate(requests)], adapters
    )
    for tokens, adapter, logits in zip(requests, adapters, together, strict=True):
        assert torch.equal(logits, whole(network, tokens, adapter))
    assert torch.equal(together[0], dense(network, requests[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_equals_one_pass(two: list[Path], dtype: torch.dtype, seed: int) -> None:
    rng = random.Random(seed)
    network = make_network("llama3", dtype)
    choices = [None, *(load(path, dtype=dtype) for path in two)]
    adapters = [rng.choice(choices) for _ in range(7)]
    requests = [random_tokens(rng, rng.randrange(1, 140), VOCAB_SIZE) for _ in adapters]
    world = PagedWorld(network, requests, rng=rng)
    parts: list[list[torch.Tensor]] = [[] for _ in requests]
    done = [0] * len(requests)
    while any(start < len(tokens) for start, tokens in zip(done, requests, strict=True)):
        spans = []
        for request in rng.sample(range(len(requests)), len(requests)):
            size = min(rng.choice((0, 0, 1, 2, 7, 16, 33, 64)), len(requests[request]) - done[request])
            if size:
                spans.append(Span(request, done[request], done[request] + size))
                done[request] += size
        if spans:
            for span, logits in zip(spans, run(world, spans, adapters), strict=True):
                parts[span.request].append(logits)
    for tokens, adapter, logits in zip(requests, adapters, parts, strict=True):
        assert torch.equal(torch.cat(logits), whole(network, tokens, adapter))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_wanted_rows_get_logits(two: list[Path], dtype: torch.dtype) -> None:
    """The last layer keeps these rows alone, in this order; each still belongs to its adapter."""
    rng = random.Random(3)
    network = make_network("llama3", dtype)
    x, y = (load(path, dtype=dtype) for path in two)
    requests = [random_tokens(rng, 20, VOCAB_SIZE) for _ in range(3)]
    world = PagedWorld(network, requests)
    spans = [Span(n, 0, 20) for n in range(3)]
    inputs = replace(world.inputs(spans, [59, 3, 25, 39, 20]), adapters=rows_of(spans, [x, None, y]))
    base, under_x, under_y = (whole(network, tokens, a) for tokens, a in zip(requests, (x, None, y), strict=True))
    assert torch.equal(
        world.runner.run(inputs), torch.stack([under_y[19], base[3], under_x[5], under_x[19], under_x[0]])
    )


def test_a_step_without_wanted_rows_writes_the_adapters_keys_and_values(two: list[Path]) -> None:
    network, x = make_network("llama3"), load(two[0])
    tokens = random_tokens(random.Random(4), 60, VOCAB_SIZE)
    world = PagedWorld(network, [tokens])
    spans = [Span(0, 0, 59)]
    world.runner.run(replace(world.inputs(spans, []), adapters=rows_of(spans, [x])))
    assert torch.equal(run(world, [Span(0, 59, 60)], [x])[0], whole(network, tokens, x)[59:])


def test_half_precision_stays_near_float32(two: list[Path]) -> None:
    tokens = random_tokens(random.Random(5), 60, VOCAB_SIZE)
    expected = whole(make_network("llama3"), tokens, load(two[0]))
    for dtype in (torch.bfloat16, torch.float16):
        logits = whole(make_network("llama3", dtype), tokens, load(two[0], dtype=dtype))
        assert (logits - expected).abs().max() < 0.15 * expected.std()


# -- the digest -------------------------------------------------------------------------------------------------------


def test_the_digest_is_of_what_is_computed_with(tmp_path: Path) -> None:
    paths = {name: tmp_path / name for name in ("one", "same", "weights", "alpha", "stabilized", "fewer")}
    save_adapter("llama3", paths["one"])
    save_adapter("llama3", paths["same"], lora_dropout=0.1)
    save_adapter("llama3", paths["weights"], seed=2)
    save_adapter("llama3", paths["alpha"], lora_alpha=9)
    save_adapter("llama3", paths["stabilized"], use_rslora=True)
    save_adapter("llama3", paths["fewer"], target_modules=PROJECTIONS[1:])
    digests = {name: load(path).digest for name, path in paths.items()}
    assert digests.pop("same") == digests["one"]
    assert len(set(digests.values())) == len(digests)
    assert all(len(digest) == 32 for digest in digests.values())
    assert load(paths["one"], dtype=torch.bfloat16).digest != digests["one"]


def test_scaling_and_rank(tmp_path: Path) -> None:
    save_adapter(
        "llama3", tmp_path, r=4, use_rslora=True, rank_pattern={"o_proj": 9}, target_modules=["o_proj", "k_proj"]
    )
    adapter = load(tmp_path)
    assert adapter.rank == 9
    delta = adapter.deltas["model.layers.1.self_attn.o_proj"]
    saved = load_file(tmp_path / WEIGHTS)
    up = saved["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"]
    assert torch.equal(delta.up[:, :9], up * (8 / math.sqrt(9)))
    assert sorted(adapter.deltas) == sorted(
        f"model.layers.{n}.self_attn.{name}" for n in range(3) for name in ("qkv_proj", "o_proj")
    )


# -- refusals ---------------------------------------------------------------------------------------------------------


def edit_config(path: Path, **values: Any) -> None:
    file = path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_adapter("llama3", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "key, value",
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("use_dora", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("alora_invocation_tokens", [5]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("kasa_config", {"beta": 1.0}),
        ("a_value_of_tomorrow", 1),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", ["c_attn"]),
        ("target_modules", ["q_proj", "embed_tokens"]),
        ("target_modules", ["lm_head"]),
        ("target_modules", ".*"),
        ("target_modules", "(q_proj"),
        ("target_modules", 5),
        ("exclude_modules", "["),
        ("layers_to_transform", "0"),
        ("layers_to_transform", True),
        ("layers_pattern", ["layers"]),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"q_proj": 4, ".*_proj": 5}),
        ("alpha_pattern", {".*mlp.*": 1, "up_proj": 5}),
        ("alpha_pattern", {"(": 1}),
        ("use_rslora", "yes"),
    ],
)
def test_refused_by_name(saved: Path, key: str, value: object) -> None:
    edit_config(saved, **{key: value})
    with pytest.raises(AdapterError, match=key):
        load(saved)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", "(.*)*q_projx"),
        ("target_modules", "(?:(?:[a-z0-9._]+)+)+X"),
    ],
)
def test_a_pattern_that_never_ends_is_refused_in_bounded_time(saved: Path, key: str, value: object) -> None:
    edit_config(saved, **{key: value})
    started = time.monotonic()
    with pytest.raises(AdapterError, match=key):
        load(saved)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "values, said",
    [
        ({"r": 0}, "rank of model.layers.0.self_attn.q_proj is 0"),
        ({"r": True}, "rank of model.layers.0.self_attn.q_proj is True"),
        ({"rank_pattern": {"k_proj": 2.5}}, "rank of model.layers.0.self_attn.k_proj is 2.5"),
        ({"lora_alpha": "8"}, "alpha of model.layers.0.self_attn.q_proj is '8'"),
        ({"alpha_pattern": {"up_proj": None}}, "alpha of model.layers.0.mlp.up_proj is None"),
        ({"target_modules": r".*q_proj", "layers_to_transform": [1]}, "layers_to_transform"),
        ({"target_modules": ["q_proj", "k_proj"]}, "v_proj.lora_A.weight is unexpected"),
        ({"r": 5}, r"is \[4, 64\], expected \[5, 64\]"),
    ],
)
def test_values_that_do_not_fit(saved: Path, values: dict[str, Any], said: str) -> None:
    edit_config(saved, **values)
    with pytest.raises(AdapterError, match=said):
        load(saved)


NAME = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"


@pytest.mark.parametrize(
    "change, said",
    [
        ({NAME: None}, f"{NAME} is missing"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(2)}, "lm_head.lora_A.weight is unexpected"),
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector": torch.zeros(2)},
            "lora_magnitude_vector",
        ),
        ({NAME: torch.zeros(96, 5)}, r"up_proj.lora_B.weight is \[96, 5\], expected \[96, 4\]"),
        ({NAME: torch.full((96, 4), torch.nan)}, "model.layers.1.mlp.gate_up_proj is not finite in float32"),
        ({NAME: torch.zeros(96, 4, dtype=torch.int32)}, "not a float type"),
    ],
)
def test_tensors_that_do_not_fit(saved: Path, change: dict[str, torch.Tensor | None], said: str) -> None:
    tensors: dict[str, torch.Tensor | None] = load_file(saved / WEIGHTS) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, saved / WEIGHTS)
    with pytest.raises(AdapterError, match=said):
        load(saved)


def test_too_large_for_float16(saved: Path) -> None:
    tensors = load_file(saved / WEIGHTS)
    tensors[NAME] *= 1e6
    save_file(tensors, saved / WEIGHTS)
    load(saved)
    with pytest.raises(AdapterError, match="not finite in float16"):
        load(saved, dtype=torch.float16)


def test_files_that_are_missing_or_damaged(saved: Path) -> None:
    weights = saved / WEIGHTS
    content = weights.read_bytes()
    weights.write_bytes(content[:-40])
    with pytest.raises(AdapterError, match="not a complete safetensors file"):
        load(saved)
    weights.unlink()
    with pytest.raises(AdapterError, match=f"has no {WEIGHTS}"):
        load(saved)
    (saved / PICKLE).write_bytes(b"")
    with pytest.raises(AdapterError, match=f"{PICKLE} is a pickle"):
        load(saved)
    (saved / CONFIG).write_text("[1]")
    with pytest.raises(AdapterError, match="not an object"):
        load(saved)
    (saved / CONFIG).write_text("{")
    with pytest.raises(AdapterError, match="cannot be read"):
        load(saved)
    (saved / CONFIG).write_text("[" * 100_000)
    with pytest.raises(AdapterError, match="cannot be read"):
        load(saved)
    with pytest.raises(AdapterError, match="no directory"):
        load(saved / "nowhere")


@pytest.mark.parametrize("path", ["~no-user-of-this-name/x", "/" + "x" * 300])
def test_paths_that_cannot_be_opened(path: str) -> None:
    with pytest.raises(AdapterError, match="cannot be opened"):
        load(Path(path))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    save_adapter("smollm2", tmp_path)
    with pytest.raises(AdapterError, match="expected"):
        load(tmp_path)
