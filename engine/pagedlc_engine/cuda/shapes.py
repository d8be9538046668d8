"""Which launch sizes are captured, and which one a step takes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from pagedlc_engine.cuda.layout import SPARE_SHARED_TILES, StepShape
from pagedlc_engine.cuda.tiles import wants_splits, wide_tiles
from pagedlc_engine.kernels.attention_plan import MIN_WIDE_ROWS, SHARED_ROWS, WIDE_ROWS, AttentionGeometry, Ints

__all__ = ["MixedNeed", "ShapeBook"]

_DECODE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_MIXED_SIZES = (
    *(32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048),
    *(2560, 3072, 4096, 6144, 8192, 12288, 16384),
)  # fmt: skip
#: Steps of more tokens have two shapes a size: one that holds everything, and one for a few whole prompts.
_TWO_SHAPES_ABOVE = 2048
_FEW_PROMPTS = 64
#: Prompts in a captured step whose last tile is not full: as many, or one for so many tokens.
_SPARE_TILES = 64
_TOKENS_A_SPARE_TILE = 32
_SPARE_SPLIT_TILES = 8
#: Idle programs cost a launch of few tiles up to a fifth of its time, so a prompt alone has a shape of its own.
_SPARE_SPLIT_TILES_ALONE = 1
#: Below this batch size keys are always shared out among programs: a few, or many when contexts are long.
_FEW = 32
#: Keys a program before there are many splits; fewer for a request alone, whose programs best read theirs in one go.
_KEYS_A_SPLIT = 384
_KEYS_A_SPLIT_ALONE = 64


def _power_of_two(value: int) -> int:
    """The largest power of two that is not above ``value``; 1 below that."""
    return 1 << (max(1, value).bit_length() - 1)


def _power_above(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True, slots=True)
class MixedNeed:
    """What a step with prompt tokens holds.

    Args:
        tokens: In all.
        samples: Rows of logits.
        narrow: Requests with one token.
        chunks: Tokens of each other request.
        split: The chunks are few and come late in their prompts.
    """

    tokens: int
    samples: int
    narrow: int
    chunks: Ints
    split: bool


class ShapeBook:
    """The shapes of one engine.

    Args:
        geometry: Of the model and its cache.
        max_num_seqs: Most requests in a step.
        max_num_batched_tokens: Most tokens in a step.
        sizes: Batch sizes to capture for decoding, in place of the built-in ones.
        capture: Whether steps are captured at all; if not, none is padded.
        specialized: Whether a program of a prefix pass with full tiles has a multiprocessor for itself, as those of
            :mod:`pagedlc_engine.kernels.specialized_attention` have.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        sizes: tuple[int, ...] | None = None,
        capture: bool = True,
        specialized: bool = False,
    ) -> None:
        self._capture = capture
        self._specialized = specialized
        self._geometry = geometry
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        most = min(max_num_seqs, max_num_batched_tokens)
        wanted = sorted(sizes or _DECODE_SIZES)
        at = bisect_left(wanted, most)
        self.decode_sizes = [*wanted[:at], wanted[at] if at < len(wanted) and sizes else most]
        mixed = [size for size in _MIXED_SIZES if size < max_num_batched_tokens]
        self.mixed_sizes = [*mixed, max_num_batched_tokens]

    @property
    def most_wide(self) -> int:
        """Tiles of prompt chunks that any step may hold."""
        per_tile = max(1, MIN_WIDE_ROWS // self._geometry.group)
        return -(-self._max_tokens // per_tile) + max(self._max_num_seqs, _SPARE_TILES)

    def _spare_tiles(self, tokens: int, requests: int) -> int:
        return min(requests, max(_SPARE_TILES, tokens // _TOKENS_A_SPARE_TILE))

    def decode(self, batch: int, *, split: bool, shared: bool) -> StepShape | None:
        """The shape for ``batch`` decoding requests, ``None`` when there are more than any."""
        if batch > self.decode_sizes[-1]:
            return None
        size = self._padded(batch)
        shape = StepShape(tokens=size, samples=size, narrow=size, narrow_splits=self._splits(size, split), decodes=True)
        return self._sharing(shape) if shared else shape

    def wants_split(self, starts: Ints) -> bool:
        """Whether decoding requests at these positions should have their keys shared out among more programs."""
        if len(starts) >= _FEW:
            return wants_splits(starts, self._geometry)
        keys = _KEYS_A_SPLIT_ALONE if len(starts) == 1 else _KEYS_A_SPLIT
        return int(starts.max()) >= keys * self._splits(self._padded(len(starts)), False)

    def _padded(self, batch: int) -> int:
        at = bisect_left(self.decode_sizes, batch)
        return self.decode_sizes[at] if self._capture and at < len(self.decode_sizes) else batch

    def _splits(self, size: int, split: bool) -> int:
        programs = size * self._geometry.num_kv_heads
        if split:
            return max(4, min(32, _power_of_two(1024 // programs)))
        return 1 if size >= _FEW else max(2, min(16, _power_of_two(2 * self._geometry.num_processors // programs)))

    def _sharing(self, shape: StepShape) -> StepShape:
        group = self._geometry.group
        rows = max(16, min(SHARED_ROWS, 1 << (shape.tokens * group - 1).bit_length()), _power_above(group))
        tiles = -(-shape.tokens * group // rows)
        at_once = 1 if self._specialized and rows == SHARED_ROWS else 2
        wanted = at_once * self._geometry.num_processors // (tiles * self._geometry.num_kv_heads)
        splits = max(2, min(16, _power_of_two(wanted)))
        return replace(shape, shared=tiles + SPARE_SHARED_TILES, shared_rows=rows, shared_splits=splits)

    def shared_tile_tokens(self, shape: StepShape) -> int:
        """Queries of a tile of the prefix pass."""
        return shape.shared_rows // self._geometry.group

    def mixed(self, need: MixedNeed) -> StepShape | None:
        """The captured shape for a step with prompt tokens; ``None`` if none fits it well."""
        at = bisect_left(self.mixed_sizes, need.tokens)
        if at == len(self.mixed_sizes) or not self._capture:
            return None
        size = self.mixed_sizes[at]
        for decodes_too, split in self._variants(size):
            if split and not need.split:
                continue
            shape = self.mixed_shape(size, decodes_too, split)
            wide = wide_tiles(need.chunks, shape.wide_rows, self._geometry)
            if need.samples <= shape.samples and need.narrow <= shape.narrow and wide <= shape.wide:
                return shape
        return None

    def _variants(self, size: int) -> list[tuple[bool, bool]]:
        """Captured shapes of ``size`` tokens: (requests with one token, too; prompts' keys are shared out). The first
        that holds a step is the best for it, and the last holds every step."""
        plain = [(False, False), (True, False)]
        return plain if size > _TWO_SHAPES_ABOVE else [(False, True), (True, True), *plain]

    def mixed_shape(self, tokens: int, decodes_too: bool, split: bool) -> StepShape:
        """The captured shape of ``tokens`` tokens.

        Args:
            tokens: One of ``mixed_sizes``.
            decodes_too: There are requests with one token.
            split: Share out the keys of prompt chunks.
        """
        group = self._geometry.group
        rows = max(WIDE_ROWS if tokens * group > MIN_WIDE_ROWS else MIN_WIDE_ROWS, _power_above(group))
        few = tokens > _TWO_SHAPES_ABOVE and not decodes_too
        requests = min(tokens, self._max_num_seqs, _FEW_PROMPTS if few else tokens)
        full = -(-tokens * group // rows)
        splits = self._wide_splits(full) if split else 1
        if splits == 1:
            spare = self._spare_tiles(tokens, requests)
        else:
            spare = min(_SPARE_SPLIT_TILES if decodes_too else _SPARE_SPLIT_TILES_ALONE, requests)
        return StepShape(
            tokens=tokens,
            samples=requests,
            narrow=requests if decodes_too else 0,
            narrow_splits=4 if decodes_too else 1,
            wide=full + spare,
            wide_rows=rows,
            wide_splits=splits,
        )

    def exact(self, need: MixedNeed) -> StepShape:
        """A shape for a step that is not captured."""
        longest = int(need.chunks.max()) if len(need.chunks) else 0
        group = self._geometry.group
        rows = max(WIDE_ROWS if longest * group > MIN_WIDE_ROWS else MIN_WIDE_ROWS, _power_above(group))
        wide = wide_tiles(need.chunks, rows, self._geometry)
        return StepShape(
            tokens=-(-need.tokens // 16) * 16,
            samples=need.samples,
            narrow=need.narrow,
            narrow_splits=4 if need.narrow else 1,
            wide=wide,
            wide_rows=rows,
            wide_splits=self._wide_splits(wide) if need.split else 1,
        )

    def _wide_splits(self, tiles: int) -> int:
        """As many as give every multiprocessor one program, whose loads then run deep."""
        programs = tiles * self._geometry.num_kv_heads
        return min(16, _power_of_two(self._geometry.num_processors // programs))

    def captured(self) -> list[StepShape]:
        """All shapes to capture at start, largest first: their memory then serves the smaller ones, too."""
        shapes: list[StepShape] = []
        for size in reversed(self.mixed_sizes):
            for variant in self._variants(size):
                shape = self.mixed_shape(size, *variant)
                if shape not in shapes:
                    shapes.append(shape)
        for size in reversed(self.decode_sizes):
            variants = [(False, False), (True, False), (False, True)]
            for split, shared in variants:
                decoding = self.decode(size, split=split, shared=shared)
                if decoding is not None and decoding not in shapes and not (shared and size < 4):
                    shapes.append(decoding)
        return shapes
