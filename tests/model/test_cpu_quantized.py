"""Quantized weights in the C backend: the file's own values, and so the same logits bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import model.cpu.dequantize
from model.cpu.dequantize import dequantize
from model.cpu.library import QUANTIZED_KINDS
from model.cpu.weights import PackedModel, WeightForm
from tests.model.cpu import Built, native
from tests.model.cpu_quantized import QuantizedNetwork, check_forms, check_widened
from tests.model.quantized_blocks import dequantized, random_quantized

ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 48, 49, 100)
KINDS = pytest.mark.parametrize("kind", QUANTIZED_KINDS, ids=lambda kind: kind.name)


@pytest.fixture(scope="module", params=["f32", "bf16"])
def built(request: pytest.FixtureRequest) -> Built:
    return native(request.param)


@KINDS
def test_dequantized_as_gguf_does(kind: Kind) -> None:
    """Whatever the signs of scales and offsets."""
    tensor = random_quantized(kind, 5, 768, seed=1, signed=True)
    assert dequantize(tensor.data, kind).tobytes() == dequantized(tensor).tobytes()


@KINDS
def test_without_the_library_gguf_dequantizes(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.cpu.dequantize, "_library", lambda: None)
    tensor = random_quantized(kind, 64, 512, seed=2)
    assert np.array_equal(dequantize(tensor.data, kind), dequantized(tensor))


@KINDS
def test_widened_values_are_those_of_gguf(kind: Kind, built: Built) -> None:
    check_widened(built, kind)


@KINDS
def test_all_forms_give_the_same_logits(kind: Kind, built: Built) -> None:
    check_forms(built, QuantizedNetwork({"": kind}), ROWS)


def test_kinds_mixed_within_a_product(built: Built) -> None:
    """q, k and v lie side by side each of its own kind; gate and up of two kinds stay unpacked."""
    kinds = {"": Kind.Q4_K, "q_proj": Kind.Q4_0, "k_proj": Kind.Q8_0, "v_proj": Kind.Q6_K, "up_proj": Kind.Q4_1}
    network = QuantizedNetwork(kinds, tied=True)
    check_forms(built, network, ROWS)
    packed = _packed(network, built, WeightForm.QUANTIZED)
    layer = packed.struct.layer[0]
    assert layer.qkv.quantized and not layer.qkv.panels
    assert layer.gate_up.panels and not layer.gate_up.quantized
    assert packed.struct.head.quantized and not packed.struct.head.panels


def test_a_kind_that_is_not_known_stays_unpacked(built: Built) -> None:
    network = QuantizedNetwork({"": Kind.Q5_0})
    assert not _packed(network, built, WeightForm.QUANTIZED).has_quantized
    check_forms(built, network, (1, 13))
    mixed = QuantizedNetwork({"": Kind.Q8_0, "k_proj": Kind.Q5_0})
    packed = _packed(mixed, built, WeightForm.QUANTIZED)
    assert packed.has_quantized and packed.struct.layer[1].qkv.panels and not packed.struct.layer[1].qkv.quantized
    check_forms(built, mixed, (1, 13))


def test_what_is_kept_in_each_form(built: Built) -> None:
    network = QuantizedNetwork({"": Kind.Q8_0})
    for form, panels, quantized in (
        (WeightForm.DENSE, True, False),
        (WeightForm.QUANTIZED, False, True),
        (WeightForm.BOTH, True, True),
    ):
        packed = _packed(network, built, form)
        for matrix in (packed.struct.layer[1].down, packed.struct.head):
            assert (bool(matrix.panels), bool(matrix.quantized)) == (panels, quantized)
        assert packed.has_quantized == quantized


def _packed(network: QuantizedNetwork, built: Built, form: WeightForm) -> PackedModel:
    weights = {name: tensor.to(built.dtype) for name, tensor in network.weights.items()}
    return PackedModel(network.config, weights, network.stored.get, form, 16, built.library)
