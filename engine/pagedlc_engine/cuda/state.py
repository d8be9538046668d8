"""What a GPU engine keeps on the device between steps, and how a step's description gets there."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import numpy as np
import torch
import triton

from pagedlc_engine.cuda.fused_decoder import StepTensors
from pagedlc_engine.cuda.layout import SPARE_SHARED_TILES, PacketLayout, StepShape
from pagedlc_engine.cuda.step_kernels import ADMISSION, admit_kernel, commit_kernel, unpack_kernel
from pagedlc_engine.cuda.tiles import narrow_rows
from pagedlc_engine.kernels.attention_plan import RECORD, AttentionGeometry, AttentionPlan, Ints, TileTable
from pagedlc_engine.kernels.launch import can_overlap, launch_options
from pagedlc_engine.model.spec import ModelSpec

__all__ = ["PACKETS", "DeviceState"]

#: Packets in flight at most; more than an engine runs ahead.
PACKETS = 16
_LANES = 256
#: Numbers in a message about new requests; a longer one is copied to the device first.
_MESSAGE_SIZE = 1 << 14
_ADMITTING_PROGRAMS = 32
_NOTHING = np.zeros(0, np.int32)


class DeviceState:
    """Slots (newest token, sampling parameters, block table) and the buffers that steps read and write.

    Args:
        layout: Of the packets.
        slots: Sequences there is room for.
        table_width: Blocks of the longest sequence.
        geometry: Of the model and its cache.
        spec: The model.
        dtype: Type of activations.
        device: A CUDA device, or a CPU with Triton's interpreter.
    """

    def __init__(
        self,
        layout: PacketLayout,
        slots: int,
        table_width: int,
        geometry: AttentionGeometry,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.slots = slots
        self.geometry = geometry
        self.device = device
        pinned = device.type == "cuda"
        self.newest = torch.zeros(slots, dtype=torch.int32, device=device)
        self.temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self.counts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.filters = torch.zeros((slots, 3), dtype=torch.float32, device=device)
        self.tables = torch.zeros((slots, -(-table_width // 4) * 4), dtype=torch.int32, device=device)
        self._ticket = torch.zeros(1, dtype=torch.int32, device=device)
        self._packets = torch.zeros((PACKETS, layout.size), dtype=torch.int32, pin_memory=pinned)
        self._results = torch.zeros((PACKETS, layout.samples), dtype=torch.int32, pin_memory=pinned)
        self.packets: list[Ints] = list(self._packets.numpy())
        self._messages = torch.zeros((PACKETS, _MESSAGE_SIZE), dtype=torch.int32, pin_memory=pinned)
        #: What :meth:`admit` reads, one for each packet; see :func:`pagedlc_engine.cuda.step_kernels.admit_kernel`.
        self.messages: list[Ints] = list(self._messages.numpy())
        self.results: list[Ints] = list(self._results.numpy())
        self._control = torch.zeros(layout.codes, dtype=torch.int32, device=device)
        self._tokens = torch.zeros((3, layout.plane), dtype=torch.int32, device=device)
        self._row_temperatures = torch.zeros(layout.samples, dtype=torch.float32, device=device)
        self._row_seeds = torch.zeros(layout.samples, dtype=torch.int64, device=device)
        self._row_counts = torch.zeros(layout.samples, dtype=torch.int64, device=device)
        self._row_filters = torch.zeros((layout.samples, 3), dtype=torch.float32, device=device)
        self.sampled = torch.zeros(layout.samples, dtype=torch.int64, device=device)
        # One for all steps: results in every graph's own memory would add up to gigabytes.
        self._hidden = torch.zeros((layout.plane, spec.hidden_size), dtype=dtype, device=device)
        self._logits = torch.zeros((layout.samples, spec.vocab_size), dtype=torch.float32, device=device)

    @property
    def sampling(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Temperature, seed, counter and filters of each row of the step under way."""
        return self._row_temperatures, self._row_seeds, self._row_counts, self._row_filters

    def copy_slots(self, older: DeviceState) -> None:
        """Take over the slots of a smaller state."""
        for name in ("newest", "temperatures", "seeds", "counts", "filters", "tables"):
            source: torch.Tensor = getattr(older, name)
            getattr(self, name)[: older.slots].copy_(source)

    def set_ticket(self, number: int) -> None:
        """The packet whose turn it is; only needed after a step that was not launched to its end."""
        self._ticket.fill_(number % PACKETS)

    def step_tensors(self, shape: StepShape) -> StepTensors:
        """Views of what a step of this shape reads."""
        layout = self.layout
        return StepTensors(
            shape=shape,
            ids=self._tokens[0, : shape.tokens],
            positions=self._tokens[1, : shape.tokens],
            cache_slots=self._tokens[2, : shape.tokens],
            sample_rows=self._control[layout.sample_rows : layout.sample_rows + shape.samples],
            plan=self._plan(shape),
            hidden=self._hidden[: shape.tokens],
            logits=self._logits[: shape.samples],
        )

    def _records(self, start: int, tiles: int) -> torch.Tensor:
        return self._control[start : start + tiles * RECORD].view(tiles, RECORD)

    def _plan(self, shape: StepShape) -> AttentionPlan:
        layout, geometry = self.layout, self.geometry
        tables = []
        if shape.wide:
            records = self._records(layout.wide_records, shape.wide)
            tokens = shape.wide_rows // geometry.group
            spare = max(0, shape.wide - -(-shape.tokens // tokens))
            tables.append(TileTable(records, shape.wide_rows, shape.wide_splits, tokens, spare=spare))
        if shape.narrow:
            records = self._records(layout.narrow, shape.narrow)
            rows = narrow_rows(geometry)
            tables.append(TileTable(records, rows, shape.narrow_splits, 1, shape.shared > 0))
        shared = None
        if shape.shared:
            records = self._records(layout.shared, shape.shared)
            tokens = shape.shared_rows // geometry.group
            shared = TileTable(records, shape.shared_rows, shape.shared_splits, tokens, spare=SPARE_SHARED_TILES)
        return AttentionPlan(
            query_lens=_NOTHING,
            context_lens=_NOTHING,
            block_tables=self.tables,
            slots=self._tokens[2, : shape.tokens],
            tables=tuple(tables),
            shared=shared,
            members=self._control[layout.members : layout.members + layout.samples * 3].view(-1, 3),
            unshared=tuple(tables),
            partial_rows=shape.partial_rows,
        )

    def unpack(self, shape: StepShape) -> None:
        """Launch: bring the packet whose turn it is to the device."""
        layout = self.layout
        samples = max(1, shape.samples)
        members = layout.samples * 3 if shape.shared else 0
        records = [tiles * RECORD for tiles in (shape.narrow, shape.shared, shape.wide)]
        longest = max(shape.tokens, samples, members, 16, *records)
        unpack_kernel[(triton.cdiv(longest, _LANES),)](
            self._packets,
            self._ticket,
            self._control,
            self.newest,
            self.tables,
            self.temperatures,
            self.seeds,
            self.counts,
            self.filters,
            self._tokens[0],
            self._tokens[1],
            self._tokens[2],
            *self.sampling,
            self.tables.stride(0),
            shape.tokens,
            samples,
            records[0],
            records[1],
            members,
            records[2],
            PACKETS=PACKETS,
            PACKET=layout.size,
            SAMPLE_ROWS=layout.sample_rows,
            SAMPLE_SLOTS=layout.sample_slots,
            NARROW=layout.narrow,
            SHARED=layout.shared,
            MEMBERS=layout.members,
            WIDE=layout.wide_records,
            CODES=layout.codes,
            TOKENS=layout.plane,
            BLOCK_SIZE=self.geometry.block_size,
            LANES=_LANES,
            num_warps=4,
        )

    def commit(self, shape: StepShape, rows: torch.Tensor) -> None:
        """Launch: keep the sampled tokens and tell the host.

        Args:
            shape: The step's.
            rows: [samples, hidden_size], not finite where the logits are not.
        """
        size = rows.shape[1]
        overlap = can_overlap()
        commit_kernel[(max(1, shape.samples),)](
            self._ticket,
            self._control,
            self.sampled,
            rows,
            rows.stride(0),
            self.newest,
            self.counts,
            self._results,
            SAMPLE_SLOTS=self.layout.sample_slots,
            PACKETS=PACKETS,
            RESULT=self.layout.samples,
            SIZE=size,
            PAD=triton.next_power_of_2(size),
            OVERLAP=overlap,
            **launch_options(4, 1, overlap=overlap),
        )

    def admit(self) -> None:
        """Launch: set the slots up that the message of the packet whose turn it is names."""
        self._launch_admit(self._messages, len(self.messages))

    def admit_many(self, message: Ints) -> None:
        """As :meth:`admit`, for a message that is longer than there is room for."""
        sent = torch.empty(len(message), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        sent.numpy()[:] = message
        self._launch_admit(sent.to(self.device, non_blocking=True), 1)

    def _launch_admit(self, messages: torch.Tensor, number: int) -> None:
        admit_kernel[(_ADMITTING_PROGRAMS,)](
            messages,
            self._ticket,
            self.temperatures,
            self.seeds,
            self.counts,
            self.filters,
            self.tables,
            self.tables.stride(0),
            MESSAGES=number,
            SIZE=_MESSAGE_SIZE,
            ADMISSION=ADMISSION,
            LANES=_LANES,
            num_warps=4,
        )
