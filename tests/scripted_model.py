"""An LLM that says what a test wants it to: the decoder is a script, everything around it is the real thing.

Scheduler, KV blocks, prefix cache, sampler, grammar masks, detokenizer and chat template are the engine's own. The
"KV cache" of the stand-in holds token ids, and the decoder reads a request's tokens back through its block table, so
a wrong block shows as a wrong answer.

The script is what the model *wants* to say. Whatever the sampler forbids (a grammar, a bad word) it leaves out and
goes on as near to its script as it may: bytes that the grammar forced upon it are passed over, wanted white space that
was not allowed is dropped, and so is all that comes before the first byte it was allowed to say. At the end of the
script it wants to end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from pagedlc import LLM, registry
from pagedlc.chat import ChatTemplate
from pagedlc.tokenizer import Tokenizer
from pagedlc_engine.attention.base import AttentionBatch
from pagedlc_engine.device import max_num_seqs
from pagedlc_engine.engine import Engine
from pagedlc_engine.grammar import GrammarCompiler, TokenVocabulary
from pagedlc_engine.hosts import EngineHost
from pagedlc_engine.kv.block_pool import BlockPool
from pagedlc_engine.kv.manager import KVCacheManager
from pagedlc_engine.loop import EngineThread
from pagedlc_engine.plan import ScheduledSequence, StepPlan
from pagedlc_engine.runner import ModelRunner, PendingResult
from pagedlc_engine.sampling import Sampler
from pagedlc_engine.scheduler import Scheduler

#: Text, or exact token ids.
Answer = str | Sequence[int]

# Logits, so far apart that no temperature mixes them up: the very next token of the script; tokens that go on with its
# text otherwise, longer ones preferred; those that leave white space out; and what it likes best when nothing of the
# script is allowed.
_NEXT = 5000.0
_GOES_ON, _GOES_ON_UNSPACED, _PER_BYTE = 3000.0, 200.0, 20.0
_END, _CLOSE = 60.0, 30.0


@dataclass(frozen=True)
class Turn:
    """A request as the script sees it.

    Args:
        number: 0 for the first request this LLM got, 1 for the second ...
        prompt: The prompt's text, special tokens written out.
        prompt_token_ids: The prompt.
    """

    number: int
    prompt: str
    prompt_token_ids: list[int]


#: One answer for every request; a list with one answer per request in order of arrival; a mapping from a text that
#: occurs in the prompt to the answer (the last matching entry counts); or a function.
Script = str | Sequence[Answer] | Mapping[str, Answer] | Callable[[Turn], Answer]

_names = itertools.count(1_000_000)
# Reading a tokenizer of 50,000 tokens takes longer than most tests: all scripts share it.
_texts: dict[tuple[Any, ...], tuple[Tokenizer, ChatTemplate]] = {}


class ScriptedLLM(LLM):
    """``LLM("smollm2")`` with a script in place of its weights.

    Args:
        script: What it wants to say.
        model: Whose tokenizer, chat template and shapes to take; ``"smollm2"`` or a model folder.
        run_ahead: Steps the engine launches before it looks at the oldest one's tokens.
        options: As for :class:`pagedlc.LLM`.
    """

    def __init__(self, script: Script, model: Any = "smollm2", *, run_ahead: int = 0, **options: Any) -> None:
        # Nobody reads the bytes once the blocks are given: they make these options differ from every other LLM's.
        unique = {"kv_cache_memory_bytes": next(_names)}
        options = {"load_format": "dummy", "num_blocks": 4096, "device": "cpu", **unique, **options}
        super().__init__(model, **options)
        self.script = script
        #: Keywords with which ``VLLMChat(**llm.options)`` and the like come to share this very engine.
        self.options = {"model": str(model), **options}
        #: Every request that was answered, in order of arrival.
        self.turns: list[Turn] = []
        self._run_ahead = run_ahead

    def answer(self, turn: Turn) -> Answer:
        """What the script says in this turn."""
        script = self.script
        if isinstance(script, str):
            return script
        if callable(script):
            return script(turn)
        if isinstance(script, Mapping):
            matches = [answer for key, answer in script.items() if key in turn.prompt]
            assert matches, f"The script has no answer for the prompt {turn.prompt!r}."
            return matches[-1]
        assert turn.number < len(script), f"The script has {len(script)} answers; this is request {turn.number + 1}."
        return script[turn.number]

    def _text_parts(self) -> tuple[Tokenizer, ChatTemplate]:
        sources = (self._files.tokenizer, self._tokenizer_source, self._chat_template_source)
        if self._text is None and sources in _texts:
            self._text = _texts[sources]
        return _texts.setdefault(sources, super()._text_parts())

    def _start_host(self) -> EngineHost:
        config, spec = self.config, self.spec
        assert config.num_blocks is not None
        decoder = _ScriptedDecoder(self)
        size = config.block_size or 16
        backend = _TokenStore(config.num_blocks * size, size)
        cache = KVCacheManager(BlockPool(config.num_blocks), size, config.enable_prefix_caching)
        budget = config.max_num_batched_tokens or 512
        scheduler = Scheduler(cache, max_num_seqs(config, torch.device("cpu")), budget, self._max_model_len)
        runner = _ScriptedRunner(decoder, backend, Sampler(spec.vocab_size, decoder.device), cache)  # type: ignore[arg-type]
        grammars = GrammarCompiler(partial(_vocabulary, self.tokenizer, spec.vocab_size))
        return EngineThread(Engine(scheduler, runner, config.seed, self._run_ahead, grammars))


def share(llm: ScriptedLLM) -> ScriptedLLM:
    """Let everyone in this process who asks for an LLM with ``llm.options`` get this one, while it lives."""
    registry._registry._llms[llm.identity] = llm
    return llm


@lru_cache
def _vocabulary(tokenizer: Tokenizer, size: int) -> TokenVocabulary:
    return tokenizer.vocabulary(size)


class _ScriptedRunner(ModelRunner):
    def execute(self, plan: StepPlan) -> PendingResult:
        self.decoder.begin(plan)  # type: ignore[attr-defined]
        return super().execute(plan)


class _TokenStore:
    """In place of an attention backend: each KV slot holds the token that was written there."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._slots = np.full(num_slots, -1, dtype=np.int64)
        self._block_size = block_size

    def plan(self, batch: AttentionBatch) -> Callable[[np.ndarray], list[np.ndarray]]:
        def write_and_read(token_ids: np.ndarray) -> list[np.ndarray]:
            """Store the step's tokens; returns the tokens of each request so far."""
            self._slots[batch.slot_mapping] = token_ids
            positions = [np.arange(length) for length in batch.context_lens]
            return [
                self._slots[table[at // self._block_size] * self._block_size + at % self._block_size]
                for table, at in zip(batch.block_tables, positions, strict=True)
            ]

        return write_and_read

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        blocks = self._slots.reshape(-1, self._block_size)
        for source, target in pairs:
            blocks[target] = blocks[source]


class _ScriptedDecoder:
    """A row's hidden state is its number in the step; its logits come from the script."""

    def __init__(self, llm: ScriptedLLM) -> None:
        self.device = torch.device("cpu")
        self.spec = llm.spec
        self._voice = _Voice(llm)
        self._items: list[ScheduledSequence] = []
        self._rows: list[tuple[ScheduledSequence, np.ndarray, int]] = []

    def begin(self, plan: StepPlan) -> None:
        self._items = plan.scheduled

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Callable[[np.ndarray], list[np.ndarray]]
    ) -> torch.Tensor:
        self._rows = []
        for item, tokens in zip(self._items, attention(token_ids.numpy()), strict=True):
            assert tokens.min() >= 0, "a request reads KV slots that nobody wrote"
            self._rows += [(item, tokens, end) for end in range(item.start + 1, item.start + item.count + 1)]
        return torch.arange(len(self._rows), dtype=torch.float32)[:, None]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # About as slow as a real model: an answer that is there at once would reach its reader in one piece.
        time.sleep(0.003)
        rows = [self._rows[int(row)] for row in hidden[:, 0]]
        return torch.stack([self._voice.logits(item, tokens[:end].tolist()) for item, tokens, end in rows])


class _Voice:
    """What the script wants to say next, as logits."""

    def __init__(self, llm: ScriptedLLM) -> None:
        self._llm = llm
        vocabulary = _vocabulary(llm.tokenizer, llm.spec.vocab_size)
        self._words = vocabulary.tokens
        self._ends = list(vocabulary.eos_token_ids)
        self._token_of = {word: token_id for token_id, word in reversed(list(enumerate(self._words))) if word}
        self._longest = max(map(len, self._token_of))
        self._scripts: dict[int, list[int]] = {}
        self._base = torch.zeros(vocabulary.size)
        self._base[self._ends] = _END
        self._base[[self._token_of[close] for close in (b'"', b"}", b"]") if close in self._token_of]] = _CLOSE

    def logits(self, item: ScheduledSequence, history: Sequence[int]) -> torch.Tensor:
        output = list(history[item.sequence.num_prompt :])
        script = self._script(item)
        logits = self._base.clone()
        rest = b"".join(self._words[token] for token in script)[self._progress(script, output) :]
        for going_on, wish in ((rest.lstrip(), _GOES_ON_UNSPACED), (rest, _GOES_ON)):
            for length in range(1, min(len(going_on), self._longest) + 1):
                token = self._token_of.get(going_on[:length])
                if token is not None:
                    logits[token] = wish + _PER_BYTE * length
        if output == script[: len(output)] and len(output) < len(script):
            logits[script[len(output)]] = _NEXT
        elif not rest:
            logits[self._ends] = _NEXT
        return logits

    def _script(self, item: ScheduledSequence) -> list[int]:
        order = item.sequence.order
        if order not in self._scripts:
            prompt = list(item.sequence.request.prompt_token_ids)
            turn = Turn(order, self._llm.tokenizer.decode(prompt, skip_special_tokens=False), prompt)
            answer = self._llm.answer(turn)
            if isinstance(answer, str):
                answer = self._llm.tokenizer.encode(answer, add_special_tokens=False)
            self._scripts[order] = list(answer)
            self._llm.turns.append(turn)
        return self._scripts[order]

    def _progress(self, script: list[int], output: list[int]) -> int:
        """How many bytes of the script the output has said, whatever else it had to say."""
        wanted = b"".join(self._words[token] for token in script)
        at = 0
        for byte in b"".join(self._words[token] for token in output):
            ahead = at
            while ahead < len(wanted) and wanted[ahead] != byte and (not at or wanted[ahead : ahead + 1].isspace()):
                ahead += 1
            if ahead < len(wanted) and wanted[ahead] == byte:
                at = ahead + 1
        return at
