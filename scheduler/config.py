"""The engine's configuration: frozen, handed down in slices. The command checks what a user says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Recovery(StrEnum):
    """What matching does with blocks after a gap (RECOVERY P2)."""

    REPAIR = "repair"  # keep what verifies, compute only what is missing
    TRUNCATE = "truncate"  # compute everything after the valid prefix


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 16  # requests running at once
    max_num_batched_tokens: int = 2048  # positions computed per step
    max_model_len: int = 2048  # prompt and output of one request; at most what the pool holds
    recovery: Recovery = Recovery.REPAIR
    partial_reuse: bool = True
    pin_share: float = 0.25  # of the pool's blocks that may be pinned


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that `pagekv serve` may set of the engine. None means: choose for this machine and model."""

    model: str | None = None  # None: the default model
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda
    backend: str = "auto"  # auto | c | torch: what computes on the CPU
    weights: str = "auto"  # auto | quantized | bfloat16: how the C backend keeps what a file has quantized
    block_size: int = 16  # tokens; a power of two
    kv_memory: int | None = None  # bytes; None: a fraction of free memory
    num_blocks: int | None = None  # overrides kv_memory
    max_model_len: int | None = None  # None: the model's own, as far as the pool holds it
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    recovery: Recovery = Recovery.REPAIR
    partial_reuse: bool = True
    pin_share: float = 0.25  # of the pool's blocks that may be pinned
    scrub_rate: float = 16.0  # published blocks checked per second; 0: never
    hash_bits: int = 128  # of block hashes; fewer only to test collisions
    adapters: tuple[tuple[str, str], ...] = ()  # LoRA adapters loaded at start: name, peft directory
    generation_config: str = "auto"  # auto | none: whether the model's own files say how to sample by default
    sampling_override: Mapping[str, object] = field(default_factory=dict)  # defaults that override the files'
    threads: int | None = None  # compute threads; None: every core this process may use
