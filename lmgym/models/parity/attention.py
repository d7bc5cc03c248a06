"""One attention for scorer and sampler: for a query the same operations in the same order, whatever is computed beside
it. Pure torch, no model code.

Queries of a row go in tiles of TILE tokens, its keys in blocks of BLOCK, counted from the row's first token. A tile's
scores with all of its keys are one product of fixed depth (the size of a head); their softmax goes row by row, and keys
behind the query have exactly nothing; values are added up block by block. More blocks behind a query add zeros, which
changes no bit. That products of other heights and widths have the same bits is tried when a policy is loaded
(inference/parity.py). Everything is in fp32. Backward is that of the usual layouts (attention/)."""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmgym.core.errors import LmgymError
from lmgym.models.attention.cached_rows import CachedRows, ExtendedRows, PrefilledRows
from lmgym.models.attention.cpu import BlockGroups, BlockRows
from lmgym.models.attention.kv_cache import KeyValueCache
from lmgym.models.attention.packed import PackedRows
from lmgym.models.attention.rules import Asked, Rule
from lmgym.models.attention.tree import BlockTree

TILE, BLOCK = 32, 64
SCORES = 2**20  # of a tile that exist at once
PLAIN = Rule()


class Span(NamedTuple):
    """The last `queries` tokens of a row, which begin at packed token `start`, and the places of all of its tokens."""

    start: int
    queries: int
    keys: Int[Tensor, " W"]


class Band:
    """N rows of about one length, as tables. Rows are filled up with their last query, and with keys that none sees.

    queries [N T]    the packed tokens, T a multiple of TILE
    position [N T]   their places in their rows
    keys [N W]       the packed tokens of each row, W a multiple of BLOCK (or, in the sampler, its slot in the cache)
    """

    def __init__(self, spans: Sequence[Span], numbers: Sequence[int]) -> None:
        starts, counts, lengths = (
            torch.tensor(column) for column in zip(*((s.start, s.queries, len(s.keys)) for s in spans), strict=True)
        )
        self.numbers = list(numbers)
        places = torch.arange(up(int(counts.max()), TILE)).expand(len(spans), -1).clamp(max=counts[:, None] - 1)
        self.queries, self.position = starts[:, None] + places, (lengths - counts)[:, None] + places
        self.keys = torch.zeros(len(spans), up(int(lengths.max()), BLOCK), dtype=torch.long)
        for row, span in enumerate(spans):
            self.keys[row, : len(span.keys)] = span.keys
        real = torch.arange(places.shape[1]) < counts[:, None]
        self.real, self.targets = real.flatten().nonzero()[:, 0], self.queries[real]  # in [N T], and packed
        self._seen: dict[Rule, list[Tensor]] = {}

    def seen(self, rule: Rule) -> list[Bool[Tensor, "N TILE W"]]:
        """What each query of each tile sees of the keys up to the last one that any of them sees."""
        if rule not in self._seen:
            tiles = self.position.split(TILE, 1)
            widths = [up(int(tile.max()) + 1, BLOCK) for tile in tiles]
            self._seen[rule] = [
                rule.sees(tile[:, :, None], torch.arange(width)) for tile, width in zip(tiles, widths, strict=True)
            ]
        return self._seen[rule]


def bands_of(spans: Sequence[Span]) -> list[Band]:
    """Spans in bands, so that in none a row has more than twice as many tiles as another."""
    alike: dict[int, list[int]] = {}
    for number, span in enumerate(spans):
        if span.queries:
            alike.setdefault((up(span.queries, TILE) // TILE).bit_length(), []).append(number)
    return [Band([spans[number] for number in numbers], numbers) for numbers in alike.values()]


def attend_tile(
    query: Float[Tensor, "R M D"],
    keys: Float[Tensor, "R W D"],
    values: Float[Tensor, "R W E"],
    seen: Bool[Tensor, "R M W"],
) -> Float[Tensor, "R M E"]:
    """Attention of scaled queries to keys that they see. A query's bits do not depend on the rest of its tile."""
    shares = torch.bmm(query, keys.transpose(1, 2)).masked_fill_(~seen, float("-inf")).softmax(-1)
    total = torch.bmm(shares[:, :, :BLOCK], values[:, :BLOCK])
    for start in range(BLOCK, keys.shape[1], BLOCK):
        block = slice(start, start + BLOCK)
        total += torch.bmm(shares[:, :, block], values[:, block])
    return total


@cache
def rows_of(heads: int, size: int, values: int, threads: int) -> int:
    """The least number of queries in a tile, at least the `heads` of one token that share a key, with which each has
    the bits that it has in a whole tile. (A product of few rows has a kernel of its own.) Raises LmgymError if there is
    none."""
    generator, tile = torch.Generator().manual_seed(0), TILE * heads
    for rows in sorted({heads, *(number for number in (2, 4, 8, 16, 32) if heads < number), tile}):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            if all(
                _same_rows(rows, tile, (width, size, values), generator) for width in (BLOCK, 3 * BLOCK, 16 * BLOCK)
            ):
                return rows
    raise LmgymError(
        f"policy.parity: in attention with heads of {size} numbers on this processor the bits of a query depend on the "
        "queries beside it; remove it"
    )


def _same_rows(rows: int, tile: int, shape: tuple[int, int, int], generator: torch.Generator) -> bool:
    """Whether queries in groups of so many have the same bits as in a tile, also behind further keys."""
    width, size, depth = shape
    query, keys, values = (
        torch.randn(3, *one, generator=generator)
        for one in ((tile, size), (width + BLOCK, size), (width + BLOCK, depth))
    )
    seen = torch.arange(width + BLOCK).expand(3, tile, -1) < width
    expected, found = attend_tile(query, keys, values, seen), []
    for start in range(0, tile - rows + 1, rows):
        part = slice(start, start + rows)
        found.append(
            attend_tile(query[:, part].contiguous(), keys[:, :width], values[:, :width], seen[:, part, :width])
        )
    together = torch.cat(found, 1)
    return torch.equal(together, expected[:, : together.shape[1]])


def attend_bands(
    query: Float[Tensor, "1 H L D"],
    bands: Sequence[Band],
    stored: Callable[[Band], tuple[Float[Tensor, "N K W D"], Float[Tensor, "N K W E"]]],
    asked: Asked,
) -> Float[Tensor, "1 L H E"]:
    """Attention of packed queries, band by band; `stored` gives a band's keys and values."""
    heads, size = query.shape[1], query.shape[-1]
    packed = query[0].transpose(0, 1).float() * asked.scale_of(size)  # [L H D]
    found = None
    for band in bands:
        keys, values = stored(band)
        count, groups = keys.shape[:2]
        if found is None:
            found = query.new_empty(len(packed), heads, values.shape[-1], dtype=torch.float32)
        tiles = packed[band.queries].view(count, -1, TILE, groups, heads // groups, size).permute(1, 0, 3, 2, 4, 5)
        outputs = []  # of each tile, [N K TILE G E]
        for tile, seen in zip(tiles, band.seen(asked.rule or PLAIN), strict=True):
            width = seen.shape[-1]
            step = max(SCORES // (heads * TILE * width), 1)
            parts = []
            for rows in torch.arange(count).split(step):
                part = slice(int(rows[0]), int(rows[-1]) + 1)
                shape = tile[part].shape  # [n K TILE G D]
                visible = seen[part, None, :, None].expand(*shape[:4], width)
                out = attend_tile(
                    tile[part].reshape(-1, TILE * shape[3], size),
                    keys[part, :, :width].flatten(0, 1),
                    values[part, :, :width].flatten(0, 1),
                    visible.reshape(-1, TILE * shape[3], width),
                )
                parts.append(out.view(*shape[:4], -1))
            outputs.append(torch.cat(parts))
        rows_out = torch.stack(outputs).permute(1, 0, 3, 2, 4, 5).reshape(count, -1, heads, values.shape[-1])
        found.index_copy_(0, band.targets, rows_out.flatten(0, 1).index_select(0, band.real))
    assert found is not None
    return found[None]


def in_bands(query: Tensor, key: Tensor, value: Tensor, bands: Sequence[Band], asked: Asked) -> Tensor:
    """Attention whose keys and values are packed with the queries."""
    packed = [tensor[0].transpose(0, 1).float().contiguous() for tensor in (key, value)]  # [L K D]

    def stored(band: Band) -> tuple[Tensor, Tensor]:
        tables = [one.index_select(0, band.keys.flatten()).view(*band.keys.shape, *one.shape[1:]) for one in packed]
        return tables[0].transpose(1, 2).contiguous(), tables[1].transpose(1, 2).contiguous()

    return attend_bands(query, bands, stored, asked)


class Exact(torch.autograd.Function):
    """apply(query, key, value, bands, usual, asked): `in_bands`; its gradient is that of a usual layout's `attend`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "1 H L D"],
        key: Float[Tensor, "1 K L D"],
        value: Float[Tensor, "1 K L E"],
        bands: Sequence[Band],
        usual: Callable[..., Tensor],
        asked: Asked,
    ) -> Float[Tensor, "1 L H E"]:
        ctx.save_for_backward(query, key, value)
        ctx.usual, ctx.asked = usual, asked
        with torch.autocast(query.device.type, enabled=False):
            return in_bands(query, key, value, bands, asked)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            narrow = [tensor.to(inputs[2].dtype) for tensor in inputs]  # positions may have been applied in fp32
            output = ctx.usual(0, *narrow, ctx.asked)
        return (*torch.autograd.grad(output, inputs, by_output.to(output.dtype)), None, None, None)


class ExactRows(BlockRows):
    """PackedRows."""

    @cached_property
    def bands(self) -> list[Band]:
        return bands_of(spans_of(self))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        return Exact.apply(query, key, value, self.bands, super().attend, asked)  # type: ignore[no-any-return, no-untyped-call]


class ExactGroups(BlockGroups):
    """PackedGroups: an answer's keys are its prompt's, then its own."""

    @cached_property
    def bands(self) -> list[Band]:
        prompts, answers = spans_of(self.prompts), spans_of(self.answers)
        behind = [
            Span(
                self.prompt_tokens + own.start,
                own.queries,
                torch.cat([prompts[prompt].keys, self.prompt_tokens + own.keys]),
            )
            for prompt, own in zip(self.prompt_of_row.tolist(), answers, strict=True)
        ]
        return bands_of([*prompts, *behind])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        return Exact.apply(query, key, value, self.bands, super().attend, asked)  # type: ignore[no-any-return, no-untyped-call]


class ExactTree(BlockTree):
    """TreeRows: the keys of a tail are those of its row."""

    @cached_property
    def bands(self) -> list[Band]:
        return bands_of([Span(tail.start, tail.stop - tail.start, row) for tail, row in self.rows])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        return Exact.apply(query, key, value, self.bands, super().attend, asked)  # type: ignore[no-any-return, no-untyped-call]


class ExactPrefilled(PrefilledRows):
    """PrefilledRows."""

    @cached_property
    def bands(self) -> list[Band]:
        return bands_of(spans_of(self))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.cache.write(layer, self.slots, self.pad(key)[self.source], self.pad(value)[self.source])
        with torch.autocast(query.device.type, enabled=False):
            return in_bands(query, key, value, self.bands, asked)


class ExactExtended(ExtendedRows):
    """ExtendedRows."""

    @cached_property
    def bands(self) -> list[Band]:
        before = (self.positions[self.new.offsets]).tolist()
        return bands_of(
            [
                Span(start, count, torch.zeros(cached + count, dtype=torch.long))  # its keys are in the cache
                for start, count, cached in zip(self.new.offsets.tolist(), self.new.lengths, before, strict=True)
            ]
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        self.cache.reserve(up(self.width, BLOCK), up(self.width, BLOCK))
        self.write(layer, key, value)

        def stored(band: Band) -> tuple[Tensor, Tensor]:
            slots, width = self.slots[band.numbers], band.keys.shape[1]
            return self.cache.keys[layer][slots, :, :width], self.cache.values[layer][slots, :, :width]

        with torch.autocast(query.device.type, enabled=False):
            return attend_bands(query, self.bands, stored, asked)


class ExactCached(CachedRows):
    """CachedRows."""

    def __init__(self, cache: KeyValueCache, lengths: Int[Tensor, " S"], width: int) -> None:
        width = up(width, BLOCK)
        cache.reserve(width, width)
        super().__init__(cache, lengths, width)
        self._visible: dict[Rule, Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        keys, values = self._stored(layer, key, value)
        slots, heads, _, size = query.shape
        groups, rule = keys.shape[1], asked.rule or PLAIN
        alike = heads // groups
        rows = rows_of(alike, size, values.shape[-1], torch.get_num_threads())
        if rule not in self._visible:
            seen = rule.sees(self.lengths[:, None], torch.arange(self.width))[:, None, None]
            self._visible[rule] = seen.expand(-1, groups, rows, -1).reshape(-1, rows, self.width)
        keys, values = (one[:slots].flatten(0, 1)[:, : self.width] for one in (keys, values))
        with torch.autocast(query.device.type, enabled=False):
            scaled = query.reshape(slots * groups, alike, size).float() * asked.scale_of(size)
            scaled = F.pad(scaled, (0, 0, 0, rows - alike))
            return attend_tile(scaled, keys, values, self._visible[rule])[:, :alike].reshape(slots, 1, heads, -1)


def spans_of(rows: PackedRows) -> list[Span]:
    """Rows that attend to themselves alone."""
    offsets = rows.offsets.tolist()
    return [
        Span(start, count, torch.arange(start, start + count))
        for start, count in zip(offsets, rows.lengths, strict=True)
    ]


def up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step
