"""The AVX-512 builds of the C backend on any processor: their functions are computed with AVX2 (avx512/immintrin.h)."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from model.cpu.library import QUANTIZED_KINDS
from tests.model.cpu import Built, emulated
from tests.model.cpu_checks import check_adapters, check_rows, check_schedule, check_values
from tests.model.cpu_quantized import QuantizedNetwork, check_forms, check_widened
from tests.model.tiny import WIDE


@pytest.fixture(scope="module", params=["f32", "bf16"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return emulated(request.param, tmp_path_factory.mktemp("avx512"))


@pytest.mark.parametrize("architecture", WIDE)
def test_values_are_those_of_the_torch_network(architecture: str, built: Built) -> None:
    check_values(architecture, built)


@pytest.mark.parametrize("index, architecture", list(enumerate(WIDE)))
def test_any_schedule_equals_one_pass(index: int, architecture: str, built: Built) -> None:
    check_schedule(architecture, built, (16, 32, 64, 128)[index % 4], threads=1 + index % 2, seed=index)


def test_neither_threads_nor_rows_change_a_bit(built: Built) -> None:
    check_rows("wide smollm2", built, threads=2)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS, ids=lambda kind: kind.name)
def test_quantized_weights_are_the_values_of_the_file(kind: Kind, built: Built) -> None:
    check_widened(built, kind)


def test_quantized_weights_change_no_bit(built: Built) -> None:
    kinds = {"": Kind.Q4_1, "k_proj": Kind.Q6_K, "v_proj": Kind.Q8_0, "down_proj": Kind.Q4_K, "o_proj": Kind.Q4_0}
    check_forms(built, QuantizedNetwork(kinds), rows=(1, 5, 12, 13, 49))


def test_adapters(built: Built, tmp_path: Path) -> None:
    check_adapters("wide qwen3", built, tmp_path)
