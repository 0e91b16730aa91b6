"""Totals: what the scheduler counts since start."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.messages import PromptUsage


@dataclass(slots=True)
class Totals:
    """Tokens unless said. For prompts whose prefill has ended, prompt == reused + copied + pending + computed."""

    steps: int = 0
    failed_steps: int = 0
    step_tokens: int = 0  # positions computed by the latest step
    preemptions: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    copied: int = 0
    pending: int = 0
    computed: int = 0
    recomputed_tokens: int = 0
    generation_tokens: int = 0

    def prefilled(self, usage: PromptUsage) -> None:
        """A request's prefill has ended for the first time."""
        self.prompt_tokens += usage.prompt_tokens
        self.reused += usage.reused
        self.copied += usage.copied
        self.pending += usage.pending
        self.computed += usage.computed
