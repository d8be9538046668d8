"""Numbers about a running engine."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot, taken after a step.

    Args:
        num_running: Answers being generated.
        num_waiting: Answers in the queue.
        num_blocks: KV blocks that can hold tokens.
        num_free_blocks: Blocks no answer holds (cached contents included).
        num_cached_blocks: Blocks whose contents can be reused.
        kv_cache_usage: Fraction of the blocks that answers hold, 0 to 1.
        prompt_tokens: Prompt tokens of all admitted requests since the start.
        cached_tokens: How many of them came from the prefix cache.
        generation_tokens: Tokens generated since the start.
        tokens_per_second: Generated tokens per second over the last seconds of work.
        num_preemptions: Times an answer lost its blocks and had to be recomputed.
        num_steps: Steps since the start.
        max_num_seqs: Most answers running at once, as set now.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    tokens_per_second: float = 0.0
    num_preemptions: int = 0
    num_steps: int = 0
    max_num_seqs: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        """Fraction of prompt tokens that came from the prefix cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ended(self) -> EngineStats:
        """The same once the engine has ended: sums since its start, nothing running and no memory."""
        return EngineStats(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generation_tokens=self.generation_tokens,
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            max_num_seqs=self.max_num_seqs,
        )
