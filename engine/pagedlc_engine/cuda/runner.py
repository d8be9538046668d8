"""Runs step plans on a GPU: captured graphs where a step fits one, the same kernels one by one elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagedlc_engine.cuda.fused_decoder import FusedDecoder, StepTensors
from pagedlc_engine.cuda.layout import PacketLayout, StepShape
from pagedlc_engine.cuda.packer import Packed, StepPacker
from pagedlc_engine.cuda.runtime import CudaRuntime, Graph, Mark, NoWait, StepEvent, capture_stream
from pagedlc_engine.cuda.shapes import MixedNeed, ShapeBook
from pagedlc_engine.cuda.slots import SlotTable
from pagedlc_engine.cuda.state import PACKETS, DeviceState
from pagedlc_engine.kernels.attention_plan import AttentionGeometry, Ints
from pagedlc_engine.kernels.launch import can_specialize_warps, compile_ahead
from pagedlc_engine.kernels.sampling import sample_tokens
from pagedlc_engine.plan import BAD_LOGITS, ScheduledSequence, StepPlan, StepResult
from pagedlc_engine.request import TokenLogprobs
from pagedlc_engine.runner import ModelRunner
from pagedlc_engine.sampling import SampledTokens, Sampler
from pagedlc_engine.sampling.rows import send_ints
from pagedlc_engine.sequence import Sequence

if TYPE_CHECKING:
    from pagedlc_engine.kv.manager import KVCacheManager

__all__ = ["CudaRunner", "PendingStep"]


@dataclass(frozen=True, slots=True)
class _Step:
    """A captured shape."""

    tensors: StepTensors
    graph: Graph


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step; :meth:`get` waits for it, and for nothing launched after it.

    Args:
        event: Reached when the step is done.
        results: Sampled tokens in pinned memory; -1 where the model gave no finite numbers.
        samples: How many.
        general: Rows that the general sampler chose for, its answer in the host's memory, and failures known before.
        prompt_logprobs: As in :class:`StepResult`.
    """

    event: Mark
    results: Ints
    samples: int
    general: tuple[list[int], SampledTokens, dict[int, str]] | None
    prompt_logprobs: dict[int, list[TokenLogprobs]]

    def done(self) -> bool:
        """Whether :meth:`get` returns without waiting."""
        return self.event.done()

    def get(self) -> StepResult:
        """The step's tokens on the host."""
        self.event.wait()
        tokens = self.results[: self.samples].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * self.samples
        failures = {row: BAD_LOGITS for row, token in enumerate(tokens) if token < 0}
        result = StepResult(tokens, logprobs, self.prompt_logprobs, failures)
        if self.general is not None:
            self._merge(*self.general, result)
        return result

    def _merge(self, rows: list[int], sampled: SampledTokens, known: dict[int, str], result: StepResult) -> None:
        for row, token, logprobs in zip(rows, sampled.token_ids.tolist(), sampled.logprobs, strict=True):
            result.token_ids[row] = token
            result.logprobs[row] = logprobs
            result.failures.pop(row, None)
        for at, problem in {**sampled.failures(), **known}.items():
            result.failures[rows[at]] = problem


class CudaRunner(ModelRunner):
    """A :class:`ModelRunner` whose step description, state and results never make the GPU wait for the host.

    Args:
        decoder: The model.
        geometry: Of the model and its cache.
        sampler: For requests that ask for more than temperature, top_k, top_p and min_p.
        max_num_seqs: Requests at once to be ready for; more are possible, at the cost of a pause.
        max_num_batched_tokens: Most tokens of a step.
        max_model_len: Longest sequence in tokens.
        use_graphs: Capture steps; otherwise every kernel is launched by itself.
        capture_sizes: Batch sizes to capture for decoding; ``None`` takes the built-in ones.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        geometry: AttentionGeometry,
        sampler: Sampler,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        use_graphs: bool = True,
        capture_sizes: tuple[int, ...] | None = None,
    ) -> None:
        self.decoder = decoder  # type: ignore[assignment]
        self.sampler = sampler
        self.device = decoder.device
        self._model = decoder
        self._short = decoder.one_of_each()
        self._geometry = geometry
        self._limits = (max_num_batched_tokens, max_model_len)
        self._use_graphs = use_graphs
        self._capture_sizes = capture_sizes
        self._stream = ctypes.c_void_p()
        self._events: list[Mark] = [NoWait()] * PACKETS
        if self.device.type == "cuda":
            self._runtime = CudaRuntime()
            stream = torch.cuda.current_stream(self.device)
            self._stream = ctypes.c_void_p(stream.cuda_stream)
            self._events = [StepEvent(self._runtime, stream) for _ in range(PACKETS)]
            self._pool = torch.cuda.graph_pool_handle()
        self._number = 0
        self._slot_table = SlotTable()
        self._in_sampler: set[int] = set()
        #: The last step's rows and slots of the general sampler, and the same on the device.
        self._general: tuple[list[int], list[int], Tensor, Tensor] | None = None
        self._steps: dict[StepShape, _Step] = {}
        self._admission: Graph | None = None
        self._max_num_seqs = max_num_seqs

    def attach(self, kv: Tensor, cache: KVCacheManager) -> None:
        """Work on this cache from now on.

        Args:
            kv: [layers, 2, blocks, block_size, kv_heads, head_dim].
            cache: Where the sequences' block tables are.
        """
        self._steps.clear()
        self._kv = kv
        self.cache = cache
        self._set_up(self._max_num_seqs, 2 * self._max_num_seqs)

    def _set_up(self, max_num_seqs: int, slots: int) -> None:
        tokens, max_model_len = self._limits
        self._book = ShapeBook(
            self._geometry, max_num_seqs, tokens, self._capture_sizes, self._use_graphs, can_specialize_warps()
        )
        layout = PacketLayout(tokens=max(tokens, max_num_seqs), samples=max_num_seqs, wide=self._book.most_wide)
        width = -(-max_model_len // self._geometry.block_size) + 1
        model = self._model
        self._state = DeviceState(layout, slots, width, self._geometry, model.spec, model.dtype, self.device)
        self._state.set_ticket(self._number)
        self._packer = StepPacker(self.cache, self._slot_table, self._book, self._geometry, layout)
        self._admission = None

    # -- capture ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def compile(self) -> int:
        """Compile the kernels of all shapes, several at a time, before any request waits; returns how many."""
        if self.device.type != "cuda":
            return 0
        compiled = compile_ahead(self._launch_all, self.device)
        self._state.set_ticket(self._number)
        torch.cuda.synchronize(self.device)
        return compiled

    def _launch_all(self) -> None:
        self._state.admit()
        self._state.admit_many(np.zeros(1, np.int32))
        # One prompt by itself, as steps that no graph fits launch it: its last row takes products of its own.
        # Of sixteen tokens, for which every packet has room: what is compiled already does run here.
        prompt = self._book.exact(MixedNeed(tokens=16, samples=1, narrow=0, chunks=np.array([16]), split=False))
        for shape in (*self._book.captured(), prompt, replace(prompt, every_row=True)):
            self._launch(self._state.step_tensors(shape), self._short)
        self.sampler.launch_kernels()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the largest step once, so that what it needs has been allocated; nothing is stored."""
        shape = self._book.mixed_shape(self._limits[0], decodes_too=True, split=False)
        self._run_empty(self._state.step_tensors(shape), self._model)
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Capture all shapes, if graphs are in use; returns how many."""
        shapes = self._book.captured() if self._use_graphs else []
        if shapes:
            self._admission_graph()
        for done, shape in enumerate(shapes):
            self._step(shape)
            if progress is not None:
                progress(done + 1, len(shapes))
        return len(shapes)

    def _step(self, shape: StepShape) -> _Step:
        """The step of this shape, captured now if it was not before."""
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = self._capture(self._state.step_tensors(shape))
        return step

    def _capture(self, step: StepTensors) -> _Step:
        # What a capture must not do happens here: libraries load their kernels for products of this size.
        self._run_empty(step, self._short)
        return _Step(step, self._record(partial(self._launch, step, self._model)))

    def _record(self, launch: Callable[[], None]) -> Graph:
        """What ``launch`` launches, as a graph."""
        torch.cuda.synchronize(self.device)
        captured = torch.cuda.CUDAGraph(keep_graph=True)
        # Other threads, maybe another engine's, go on using the device meanwhile.
        stream = capture_stream(self.device)
        with torch.cuda.graph(captured, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            launch()
        return Graph(self._runtime, captured)

    def _run_empty(self, step: StepTensors, model: FusedDecoder) -> None:
        """Run a step without tokens."""
        self._next_packet()[:2] = 0
        self._launch(step, model)
        self._end_packet()

    # -- steps -----------------------------------------------------------------------------------------

    def _next_packet(self) -> Ints:
        at = self._number % PACKETS
        self._events[at].wait()
        packet = self._state.packets[at]
        packet[2] = at
        return packet

    def _end_packet(self) -> int:
        at = self._number % PACKETS
        self._events[at].record(self._stream)
        self._number += 1
        return at

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingStep:  # type: ignore[override]
        """Launch a step. Steps run in the order of these calls."""
        self._release(plan.released)
        self._make_room(plan)
        if plan.copies:
            self._copy_blocks(plan.copies)
        try:
            packet = self._next_packet()
            packed = self._packer.pack(plan, packet)
            if packed.admissions:
                self._admit(packed.admissions.message())
            step = self._run(packed, packet)
            general = self._sample_general(packed, step.logits) if packed.general else None
            logprobs = self._prompt_logprobs(plan, step.hidden) if packed.shape.every_row else {}
            at = self._end_packet()
        except BaseException:
            self._recover()
            raise
        return PendingStep(self._events[at], self._state.results[at], packed.samples, general, logprobs)

    def _admit(self, message: Ints) -> None:
        """Set slots up, before the step that is packed."""
        room = self._state.messages[self._number % PACKETS]
        if len(message) > len(room):
            self._state.admit_many(message)
            return
        room[: len(message)] = message
        if self._use_graphs:
            self._admission_graph().launch(self._stream)
        else:
            self._state.admit()

    def _admission_graph(self) -> Graph:
        if self._admission is None:
            # By itself first, so that its kernel is loaded; to do the same twice does no harm.
            self._state.admit()
            self._admission = self._record(self._state.admit)
        return self._admission

    def _run(self, packed: Packed, packet: Ints) -> StepTensors:
        if packed.captured and self._use_graphs:
            if packed.shape not in self._steps:
                self._capture_late(packed.shape, packet)
            step = self._step(packed.shape)
            step.graph.launch(self._stream)
            return step.tensors
        tensors = self._state.step_tensors(packed.shape)
        self._launch(tensors, self._model)
        return tensors

    def _capture_late(self, shape: StepShape, packet: Ints) -> None:
        """Capture a shape whose first step is packed already. The empty step of a capture takes the packet's turn,
        so what is in it moves to the next one."""
        content = packet.copy()
        self._step(shape)
        moved = self._next_packet()
        turn = moved[2]
        moved[:] = content
        moved[2] = turn

    def _launch(self, step: StepTensors, model: FusedDecoder) -> None:
        """Launch every kernel of a step."""
        shape = step.shape
        self._state.unpack(shape)
        rows = model.forward(step, self._kv)
        if shape.samples:
            settings = [tensor[: shape.samples] for tensor in self._state.sampling]
            sample_tokens(step.logits, *settings, out=self._state.sampled[: shape.samples])
        self._state.commit(shape, rows)

    def _recover(self) -> None:
        """After a step that was not launched to its end: device and host agree on the next packet again."""
        self._packer.forget()
        self._state.set_ticket(self._number)
        # What was launched of it may read its packet later, and the next step waits for this before it writes there.
        self._events[self._number % PACKETS].record(self._stream)

    def _make_room(self, plan: StepPlan) -> None:
        """Grow when there are more sequences than ever before."""
        samples = sum(len(item.samplers) for item in plan.scheduled)
        rows = max(samples, len(plan.scheduled))
        needed = len(self._slot_table) + rows
        layout = self._state.layout
        if rows <= layout.samples and needed <= self._state.slots:
            return
        for event in self._events:
            event.wait()
        older = self._state
        self._steps.clear()
        self._set_up(max(rows, layout.samples), 2 * max(needed, older.slots))
        self._state.copy_slots(older)

    def _copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        sources, destinations = torch.tensor(pairs, dtype=torch.int64, device=self.device).unbind(1)
        self._kv.index_copy_(2, destinations, self._kv.index_select(2, sources))

    def _sample_general(self, packed: Packed, logits: Tensor) -> tuple[list[int], SampledTokens, dict[int, str]]:
        """Let the general sampler choose where the step's own choice does not do."""
        rows = [row for row, _ in packed.general]
        sequences = [sequence for _, sequence in packed.general]
        slots = [self._sampler_slot(sequence) for sequence in sequences]
        failures: dict[int, str] = {}
        alone = StepPlan([ScheduledSequence(sequence, 0, 1, [sequence]) for sequence in sequences])
        if self._general is None or self._general[:2] != (rows, slots):
            self._general = rows, slots, send_ints(rows, self.device), send_ints(slots, self.device)
        row_index, slot_index = self._general[2:]
        own = logits[: packed.samples] if len(rows) == packed.samples else logits.index_select(0, row_index)
        sampled = self.sampler.sample(own.float(), slots, self._allowed(alone, failures))
        self._state.newest.index_copy_(0, slot_index, sampled.token_ids.to(torch.int32))
        # Queued before the step's event: reading it later waits for this step only.
        return rows, sampled.on_host(), failures

    def _sampler_slot(self, sequence: Sequence) -> int:
        slot = self._slot_table.get(sequence.key)
        if slot is None:
            slot = self._slot_table.add(sequence)
        if slot.index not in self._in_sampler:
            self._in_sampler.add(slot.index)
            request = sequence.request
            self.sampler.add(
                slot.index,
                request.params,
                sequence.seed,
                request.prompt_token_ids,
                sequence.tokens[sequence.num_prompt :],
                sequence.stop_token_ids,
                request.bad_words_token_ids,
            )
        return slot.index

    def _release(self, keys: list[int]) -> None:
        for key in keys:
            slot = self._slot_table.pop(key)
            if slot is not None and slot.index in self._in_sampler:
                self._in_sampler.remove(slot.index)
                self.sampler.remove(slot.index)

    def close(self) -> None:
        """Wait for the last step and give all memory back to the driver."""
        for event in self._events:
            event.wait()
        self._steps.clear()
        self._admission = None
        del self._state, self._packer, self._kv, self._model, self._short, self.decoder, self.sampler
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
