"""The engine itself: requests in, steps, tokens out. One thread owns it."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pagedlc_engine.config import EngineConfig
from pagedlc_engine.device import Placement, max_num_seqs, num_kv_blocks, on_device, place
from pagedlc_engine.errors import ConfigError, InvalidRequestError, OutOfMemoryError, PagedLCError, without_frames
from pagedlc_engine.grammar import GrammarCompiler, TokenVocabulary
from pagedlc_engine.grammar.waiting import GrammarQueue, WaitingForGrammar
from pagedlc_engine.kv.block_pool import BlockPool
from pagedlc_engine.kv.manager import KVCacheManager
from pagedlc_engine.model import ModelSpec, load_model
from pagedlc_engine.model.decoder import Decoder, StepModel
from pagedlc_engine.model.weights import open_weights
from pagedlc_engine.native import Library, NativeDecoder
from pagedlc_engine.plan import StepPlan
from pagedlc_engine.request import Request, TokenDelta
from pagedlc_engine.run_ahead import RunAhead
from pagedlc_engine.runner import ModelRunner, PendingResult
from pagedlc_engine.sampling import Sampler
from pagedlc_engine.scheduler import Scheduler
from pagedlc_engine.stats import EngineStats
from pagedlc_engine.threads import StepThreads, usual_threads

__all__ = ["Engine", "Progress", "build_engine", "check_max_model_len", "failed_delta", "model_limit"]

#: Called with (done, total) while weights load.
Progress = Callable[[int, int], None]

RATE_WINDOW_SECONDS = 5.0


class Engine:
    """Steps a scheduler and a runner.

    Args:
        scheduler: Plans steps.
        runner: Computes them.
        seed: Seeds requests that bring none, in order of arrival; ``None`` draws from the operating system.
        run_ahead: How many steps may be launched before the oldest one's tokens are looked at.
        grammars: Compiles ``structured_outputs``; without it such requests are refused.
        most_ahead: How many while this thread comes too late to keep the device busy; ``None``: no more than else.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        seed: int | None = None,
        run_ahead: int = 0,
        grammars: GrammarCompiler | None = None,
        most_ahead: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        #: Called, on any thread, when a request that waited for its grammar can go on.
        self.wake: Callable[[], None] = lambda: None
        self._grammars = grammars
        self._compiling = GrammarQueue()
        self._run_ahead = RunAhead(run_ahead, most_ahead or run_ahead)
        self._random = random.Random(seed) if seed is not None else random.SystemRandom()
        self._launched: deque[tuple[StepPlan, PendingResult]] = deque()
        self._num_steps = 0
        self._num_counted = 0
        #: Of the last seconds' steps the end, the length and the tokens; and the sums of the latter two.
        self._recent: deque[tuple[float, float, int]] = deque()
        self._recent_seconds = 0.0
        self._recent_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request, or let it wait for its grammar first.

        Raises:
            InvalidRequestError: A live request has its id, or this engine knows no grammars.
        """
        seed = self._random.getrandbits(63)
        if request.request_id in self._compiling:
            raise InvalidRequestError(f"A request with id {request.request_id!r} is running already.")
        spec = request.params.structured_outputs
        if spec is None:
            self.scheduler.add(request, seed)
            return
        if self._grammars is None:
            raise InvalidRequestError("This engine was built without a vocabulary: it knows no structured_outputs.")
        matcher = self._grammars.compile(spec)
        if matcher.done():
            self.scheduler.add(request, seed, matcher.result())
            return
        self._compiling.put(WaitingForGrammar(request, seed, matcher))
        matcher.add_done_callback(lambda _: self.wake())

    def abort(self, request_id: str, index: int | None = None) -> list[TokenDelta]:
        """Give up a request or one of its answers."""
        return [*self._compiling.abort(request_id, index), *self.scheduler.abort(request_id, index)]

    def has_work(self) -> bool:
        """True while a step would do something."""
        return self.scheduler.has_work() or bool(self._launched) or self._compiling.any_ready

    def step(self) -> list[TokenDelta]:
        """Plan and launch one step, and take in the oldest launched ones when it is their turn."""
        start = time.monotonic()
        deltas = self._queue_compiled()
        if self._launched and self._run_ahead.adapts:
            self._run_ahead.note(late=self._launched[-1][1].done())
        plan = self.scheduler.schedule()
        if plan is not None:
            try:
                self._launched.append((plan, self.runner.execute(plan)))
            except Exception as error:
                deltas += self.scheduler.fail_step(plan, _step_error(error))
        if self._launched and plan is None:
            deltas += self._take_in(*self._launched.popleft())
        while self._must_take_in(plan):
            deltas += self._take_in(*self._launched.popleft())
        self._count(start)
        return deltas

    def _queue_compiled(self) -> list[TokenDelta]:
        """Hand requests whose grammar is there to the scheduler; one that has none fails."""
        deltas: list[TokenDelta] = []
        for item in self._compiling.take_ready():
            open_answers = [index for index in range(item.request.params.n) if index not in item.given_up]
            try:
                self.scheduler.add(item.request, item.seed, item.matcher.result())
            except PagedLCError as error:
                deltas += [failed_delta(item.request, index, error) for index in open_answers]
                continue
            for index in item.given_up:
                self.scheduler.abort(item.request.request_id, index)
        return deltas

    def _must_take_in(self, plan: StepPlan | None) -> bool:
        """Whether it is the oldest launched step's turn. Whoever comes next must not wait for many long steps."""
        ahead, number = self._run_ahead, len(self._launched)
        if number <= ahead.usual:
            return False
        if number > ahead.steps or self._launched[0][1].done():
            return True
        return plan is not None and plan.num_tokens > len(plan.scheduled)

    def _take_in(self, plan: StepPlan, pending: PendingResult) -> list[TokenDelta]:
        try:
            return self.scheduler.update(plan, pending.get())
        except Exception as error:
            failed = _step_error(error)
            deltas = self.scheduler.fail_step(plan, failed)
            # Steps launched meanwhile may have read what this one should have written.
            while self._launched:
                deltas += self.scheduler.fail_step(self._launched.popleft()[0], failed)
            return deltas

    def _count(self, start: float) -> None:
        self._num_steps += 1
        now = time.monotonic()
        generated = self.scheduler.num_generated
        self._recent.append((now, now - start, generated - self._num_counted))
        self._recent_seconds += now - start
        self._recent_tokens += generated - self._num_counted
        self._num_counted = generated
        while self._recent[0][0] < now - RATE_WINDOW_SECONDS:
            _, seconds, tokens = self._recent.popleft()
            self._recent_seconds -= seconds
            self._recent_tokens -= tokens

    def count_cached(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a hash chain the prefix cache holds now."""
        cache = self.scheduler.cache
        return len(cache.match_prefix(block_hashes, len(block_hashes) * cache.block_size))

    def close(self) -> None:
        """Give the device's memory back; the engine is of no use afterwards."""
        self._launched.clear()
        self.runner.close()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes; running requests go on."""
        self.scheduler.cache.pool.forget_all()

    def stats(self) -> EngineStats:
        """A snapshot."""
        rate = self._recent_tokens / self._recent_seconds if self._recent_seconds > 0 else 0.0
        known = self.scheduler.stats()
        waiting = known.num_waiting + self._compiling.num_answers
        return replace(known, num_waiting=waiting, num_steps=self._num_steps, tokens_per_second=rate)


def failed_delta(request: Request, index: int, error: PagedLCError) -> TokenDelta:
    """The only delta of an answer that fails before it began."""
    return TokenDelta(request.request_id, index, [], finish_reason="error", error=error)


def _step_error(error: Exception) -> PagedLCError:
    if isinstance(error, PagedLCError):
        return error
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
        made: PagedLCError = OutOfMemoryError(
            f"A step ran out of memory ({text.splitlines()[0] if text else 'no detail'}). "
            "Lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization."
        )
    else:
        made = PagedLCError(f"A step of the engine failed: {type(error).__name__}: {text}")
    made.__cause__ = without_frames(error)
    return made


def build_engine(
    config: EngineConfig,
    spec: ModelSpec,
    progress: Progress | None = None,
    vocabulary: Callable[[], TokenVocabulary] | None = None,
) -> Engine:
    """Load the weights, allocate the KV cache and put an engine together.

    Args:
        config: The engine's options.
        spec: The model's.
        progress: Told while weights load.
        vocabulary: Makes the vocabulary when the first request with ``structured_outputs`` comes.

    Raises:
        ConfigError: Options do not fit the model or the machine.
        ModelLoadError: The files are damaged.
        OutOfMemoryError: Weights or cache do not fit.
    """
    placement = place(config, spec)
    max_model_len = check_max_model_len(config, spec)
    if config.num_blocks is not None or config.kv_cache_memory_bytes is not None:
        # What cannot fit is said before anybody waits for weights.
        num_kv_blocks(config, placement, spec, max_model_len)
    make = _cuda_runner if placement.fused else _plain_runner
    with on_device(placement.device):
        runner, cache = make(config, placement, spec, max_model_len, progress)
    scheduler = Scheduler(
        cache,
        max_num_seqs(config, placement.device),
        placement.max_num_batched_tokens,
        max_model_len,
        placement.max_num_batched_tokens_while_streaming,
    )
    grammars = None if vocabulary is None else GrammarCompiler(vocabulary)
    return Engine(scheduler, runner, config.seed, placement.run_ahead, grammars, placement.most_ahead)


def _plain_runner(
    config: EngineConfig, placement: Placement, spec: ModelSpec, max_model_len: int, progress: Progress | None
) -> tuple[ModelRunner, KVCacheManager]:
    decoder: StepModel
    if placement.native is not None:
        decoder = _load_native(config, placement.native, spec, max_model_len, progress)
        threads = StepThreads(None)
    else:
        decoder = plain = _load(config, placement, spec, max_model_len, progress)
        threads = StepThreads(plain)
    num_blocks = num_kv_blocks(config, placement, spec, max_model_len)
    backend = placement.attention(spec, placement.block_size, num_blocks, placement.dtype, placement.device)
    cache = KVCacheManager(BlockPool(num_blocks), placement.block_size, config.enable_prefix_caching)
    sampler = Sampler(spec.vocab_size, placement.device)
    return ModelRunner(decoder, backend, sampler, cache, threads), cache


def _cuda_runner(
    config: EngineConfig, placement: Placement, spec: ModelSpec, max_model_len: int, progress: Progress | None
) -> tuple[ModelRunner, KVCacheManager]:
    from pagedlc_engine.cuda.build import build_cuda_runner
    from pagedlc_engine.cuda.memory import MemoryBudget

    budget = MemoryBudget.of(placement.device, config.gpu_memory_utilization)
    decoder = _load(config, placement, spec, max_model_len, progress)
    return build_cuda_runner(config, placement, decoder, max_model_len, budget, progress)


def _load_error(error: RuntimeError) -> PagedLCError:
    if "allocate" not in str(error) and "out of memory" not in str(error).lower():
        return PagedLCError(f"The model could not be loaded: {error}")
    return OutOfMemoryError(
        f"The model's weights do not fit into memory: {str(error).splitlines()[0]} Use a smaller model or dtype, or "
        "free what other programs hold."
    )


def _load(
    config: EngineConfig, placement: Placement, spec: ModelSpec, max_model_len: int, progress: Progress | None
) -> Decoder:
    try:
        return load_model(
            config.model,
            spec,
            config.load_format,
            placement.dtype,
            placement.device,
            placement.quantization,
            config.seed or 0,
            progress,
            max_model_len,
        )
    except RuntimeError as error:
        raise _load_error(error) from without_frames(error)


def _load_native(
    config: EngineConfig, library: Library, spec: ModelSpec, max_model_len: int, progress: Progress | None
) -> NativeDecoder:
    try:
        cpu = torch.device("cpu")
        source = open_weights(config.model, spec, config.load_format, torch.float32, cpu, config.seed or 0)
        return NativeDecoder(spec, source, library, usual_threads(), max_model_len, progress)
    except RuntimeError as error:
        raise _load_error(error) from without_frames(error)


def check_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest prompt plus answer in tokens; known before any weight is read.

    A model with dynamic rotary scaling may be stretched by its factor, when asked for; by itself it stays within
    the context it was trained on, where its answers are best.

    Raises:
        ConfigError: ``max_model_len`` exceeds what the model was made for.
    """
    if config.max_model_len is None:
        return spec.max_position_embeddings
    longest = model_limit(spec)
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for at most {longest} tokens."
        )
    return config.max_model_len


def model_limit(spec: ModelSpec) -> int:
    """The longest prompt plus answer in tokens that may be asked for."""
    scaling = spec.rope.scaling or {}
    stretch = float(str(scaling["factor"])) if scaling.get("type") == "dynamic" else 1.0
    return int(spec.max_position_embeddings * stretch)
