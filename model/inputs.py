"""What one forward pass is given: flat tensors. The network knows no request and no phase, only rows.

Every token to compute is one flat index t in [0, T). Spans lie one after the other in that order, each a run of
contiguous positions of one request; decode is a span of length 1, a prompt's chunk is a span, a repaired gap is a span.

    span 0        span 1 span 2
    |t0 t1 t2 t3 |t4    |t5 t6 |         q_len   = [4, 1, 2]
    pos 32..35    pos 99 pos 0,1         kv_len  = [36, 100, 2]     (= end of the span: everything before is written,
                                                                     or is written by this very pass)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.lora import LoraAdapter


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that one adapter changes; no row has two, and those of the base model have none."""

    rows: torch.Tensor  # int64 [n]: flat indices, each once
    adapter: LoraAdapter


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Flat inputs of one pass; T tokens, S spans, W blocks in the widest table, N rows whose logits are wanted.

    `q_len` and `kv_len` are plain tuples because they steer loops; the tensors live on the network's device.
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [T]: block_id * block_size + offset, where K/V of the token go
    q_len: tuple[int, ...]  # [S] tokens in each span
    kv_len: tuple[int, ...]  # [S] positions the span's last token attends to, itself included
    block_tables: torch.Tensor  # int32 [S, W]: block ids in position order; entries past kv_len are 0
    logit_rows: torch.Tensor  # int64 [N]: flat indices whose logits are wanted
    adapters: tuple[AdapterRows, ...] = ()
