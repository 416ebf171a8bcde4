"""KV memory: one pool of equal units, pages of tokens built from units, and the prefix cache.

Layers with the same (kv heads, head sizes, window) form a *KV group*; the draft's layers are one more group. A page of a group
holds `page_size` tokens of all its layers. Groups differ in bytes per page, so a page is made of one or more equal *units* of
one pool, each holding some of the group's layers: memory moves freely between groups, and nothing fragments.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.engine.request import Span
from flashdraft.targets.discovery import LayerSpec
from flashdraft.targets.target import Target

NEVER = 1 << 62
NOTHING = 0  # unit of zeros that is never written: tables name it where a sequence has no page
TRASH = -1  # the last unit, never read: padding rows write there, whatever their numbers


@dataclass(frozen=True)
class KVShape:
    """Keys and values of one layer. Layers of equal shape are grouped."""

    kv_heads: int
    key_size: int
    value_size: int
    window: int | None
    draft: bool = False  # the draft's layers form groups of their own: an engine without a draft has the target's groups only

    def elements(self, page_size: int) -> int:
        return page_size * self.kv_heads * (self.key_size + self.value_size)


def kv_shapes(target: Target, draft: DFlashDraft | None) -> list[KVShape]:
    """One shape for each layer that stores keys: the target's own (shared layers read another's pages), then the draft's."""
    return shapes_of(target.layer_specs, None if draft is None else draft.config)


def shapes_of(specs: SequenceOf[LayerSpec], draft: DFlashConfig | None) -> list[KVShape]:
    """The same of a target's layers and a draft's configuration."""
    own = [spec for index, spec in enumerate(specs) if spec.source == index]
    shapes = [KVShape(spec.kv_heads, spec.key_size, spec.value_size, spec.window) for spec in own]
    if draft is not None:
        heads, size = draft.num_key_value_heads, draft.head_dim
        shapes += [KVShape(heads, size, size, window, draft=True) for window in draft.windows]
    return shapes


@dataclass(frozen=True)
class LayerPages:
    """Where a layer's keys and values live: views of the pool [units, page size, kv heads, D], and its row of page tables."""

    slab: int
    keys: Tensor
    values: Tensor


@dataclass(eq=False)
class Page:
    """page_size tokens of one group: one unit of the pool for each slab of the group's layers."""

    units: tuple[int, ...]
    refs: int = 1
    key: bytes | None = None  # set once published in the prefix cache


@dataclass
class SequencePages:
    """The pages of one sequence in one group, by absolute page index; None where a page left the window."""

    pages: list[Page | None] = field(default_factory=list)
    first_held: int = 0  # pages before this one have been dropped
    published: int = 0  # pages before this one are in the prefix cache (or came from it)


class Group:
    """Layers of one shape: their slabs (how many layers share a unit) and their published pages."""

    def __init__(
        self, index: int, shape: KVShape, num_layers: int, page_size: int, unit_elements: int, first_slab: int
    ) -> None:
        self.index, self.shape, self.num_layers, self.first_slab = index, shape, num_layers, first_slab
        self.layer_elements = shape.elements(page_size)
        self.layers_per_unit = unit_elements // self.layer_elements
        self.slabs = -(-num_layers // self.layers_per_unit)
        self.published: dict[bytes, Page] = {}


class PagePool:
    """All KV memory of an engine.

    shapes: one KVShape for each layer that stores keys (target layers, then draft layers). num_bytes is the memory to use.
    zeroed: pages are zeros when handed out, for an attention that reads slots before they are written.
    """

    def __init__(
        self,
        shapes: SequenceOf[KVShape],
        *,
        page_size: int,
        num_bytes: int,
        dtype: torch.dtype,
        device: torch.device | str,
        zeroed: bool = True,
    ) -> None:
        self.page_size, self.zeroed = page_size, zeroed
        kinds = list(dict.fromkeys(shapes))
        counts = [sum(s == kind for s in shapes) for kind in kinds]
        # A unit holds one page of the smallest group, but at least one layer of the largest: little waste and few slabs.
        layer_elements = [kind.elements(page_size) for kind in kinds]
        unit = max(max(layer_elements), min(c * e for c, e in zip(counts, layer_elements, strict=True)))
        self.unit_bytes = unit * dtype.itemsize
        self.num_units = max(1, num_bytes // self.unit_bytes)
        self.groups: list[Group] = []
        self.num_slabs = 0
        for index, (kind, n) in enumerate(zip(kinds, counts, strict=True)):
            self.groups.append(Group(index, kind, n, page_size, unit, self.num_slabs))
            self.num_slabs += self.groups[-1].slabs
        # Not zeroed as a whole: units are when handed out, and until then the CPU gives them no memory.
        self.memory = torch.empty((self.num_units + 2, unit), dtype=dtype, device=device)
        self.memory[NOTHING] = 0
        self.layers = self._layers(shapes, kinds)
        self.free_units = list(range(self.num_units, NOTHING, -1))
        self.idle: OrderedDict[Page, Group] = OrderedDict()  # published pages nobody holds, oldest first
        self.idle_units = 0
        self.poisoned = False

    def _layers(self, shapes: SequenceOf[KVShape], kinds: list[KVShape]) -> list[LayerPages]:
        seen = [0] * len(kinds)
        layers = []
        for shape in shapes:
            index = kinds.index(shape)
            group, position = self.groups[index], seen[index]
            seen[index] += 1
            slab, place = divmod(position, group.layers_per_unit)
            start, size = place * group.layer_elements, self.page_size * shape.kv_heads * shape.key_size
            rows = (-1, self.page_size, shape.kv_heads)
            keys = self.memory[:, start : start + size].view(*rows, shape.key_size)
            values = self.memory[:, start + size : start + group.layer_elements].view(*rows, shape.value_size)
            layers.append(LayerPages(group.first_slab + slab, keys, values))
        return layers

    def poison(self) -> None:
        """For tests: from now on every unit that belongs to nobody is NaN, so that any read of it shows."""
        self.poisoned = True
        self.memory[[*self.free_units, TRASH]] = float("nan")

    @property
    def available_units(self) -> int:
        return len(self.free_units) + self.idle_units

    def allocate(self, group: Group) -> Page | None:
        """A fresh page, evicting idle published pages if need be; None when memory is exhausted."""
        while len(self.free_units) < group.slabs:
            if not self.idle:
                return None
            page, owner = self.idle.popitem(last=False)
            self.idle_units -= len(page.units)
            self._unpublish(owner, page)
            self._release(page)
        units = tuple(self.free_units.pop() for _ in range(group.slabs))
        if self.zeroed:  # once for every page_size tokens (kernels/attention.py says why)
            self.memory[list(units)] = 0
        return Page(units)

    def retain(self, page: Page) -> None:
        if page.refs == 0:
            del self.idle[page]
            self.idle_units -= len(page.units)
        page.refs += 1

    def free(self, group: Group, page: Page) -> None:
        page.refs -= 1
        assert page.refs >= 0, "a page was freed twice"
        if page.refs:
            return
        if page.key is None:
            self._release(page)
        else:
            self.idle[page] = group
            self.idle_units += len(page.units)

    def publish(self, group: Group, page: Page, key: bytes) -> None:
        """Offer a full page of committed tokens to later requests; a second page of equal content stays private."""
        if page.key is None and key not in group.published:
            page.key = key
            group.published[key] = page

    def flush(self) -> None:
        """Forget every published page that nobody holds."""
        while self.idle:
            page, group = self.idle.popitem()
            self._unpublish(group, page)
            self._release(page)
        self.idle_units = 0

    def _unpublish(self, group: Group, page: Page) -> None:
        assert page.key is not None
        del group.published[page.key]
        page.key = None

    def _release(self, page: Page) -> None:
        if self.poisoned:
            self.memory[list(page.units)] = float("nan")
        self.free_units.extend(page.units)


class CacheManager:
    """Pages of sequences: growth, windows, freeing, prefix hits. Pure bookkeeping on the host."""

    def __init__(self, pool: PagePool, *, enable_prefix_caching: bool = True) -> None:
        self.pool, self.enable_prefix_caching = pool, enable_prefix_caching
        self.page_size = pool.page_size

    def new_sequence(self) -> list[SequencePages]:
        return [SequencePages() for _ in self.pool.groups]

    def units_for(self, tokens: int, lookahead: int) -> int:
        """Units that a sequence of this many tokens needs, windowed groups holding a window and `lookahead` rows at most."""
        total = 0
        for group in self.pool.groups:
            window = group.shape.window
            held = tokens if window is None else min(tokens, window + lookahead + self.page_size)
            total += group.slabs * -(-held // self.page_size)
        return total

    def bytes_for(self, tokens: int, lookahead: int) -> int:
        """The same in bytes."""
        return self.units_for(tokens, lookahead) * self.pool.unit_bytes

    def grow(self, held: list[SequencePages], tokens: int) -> bool:
        """Make room for positions 0..tokens-1 in every group; False (and nothing kept) when memory is exhausted."""
        added: list[tuple[Group, SequencePages]] = []
        for group, own in zip(self.pool.groups, held, strict=True):
            while len(own.pages) * self.page_size < tokens:
                page = self.pool.allocate(group)
                if page is None:
                    for other_group, other in reversed(added):
                        last = other.pages.pop()
                        assert last is not None
                        self.pool.free(other_group, last)
                    return False
                own.pages.append(page)
                added.append((group, own))
        return True

    def room(self, held: list[SequencePages]) -> int:
        """Positions that the pages hold."""
        return min(len(own.pages) for own in held) * self.page_size

    def drop_behind(self, held: list[SequencePages], position: int) -> int:
        """Free the pages of windowed groups that no query at `position` or later can see; the next position that frees any."""
        following = NEVER
        for group, own in zip(self.pool.groups, held, strict=True):
            if group.shape.window is None:
                continue
            keep_from = max(0, position - group.shape.window + 1) // self.page_size
            for index in range(own.first_held, min(keep_from, len(own.pages))):
                page = own.pages[index]
                if page is not None:
                    self.pool.free(group, page)
                    own.pages[index] = None
            own.first_held = max(own.first_held, keep_from)
            following = min(following, (keep_from + 1) * self.page_size + group.shape.window - 1)
        return following

    def free(self, held: list[SequencePages]) -> None:
        for group, own in zip(self.pool.groups, held, strict=True):
            # Last pages first: the idle list is evicted oldest first, and a prefix is worth more than what follows it.
            for page in reversed(own.pages):
                if page is not None:
                    self.pool.free(group, page)
            own.pages.clear()
            own.first_held = own.published = 0

    def publish(self, held: list[SequencePages], keys: list[bytes], computed: int) -> None:
        """Publish the pages that lie wholly in the `computed` committed positions; keys[i] names page i's content."""
        if not self.enable_prefix_caching:
            return
        full = min(computed // self.page_size, len(keys))
        for group, own in zip(self.pool.groups, held, strict=True):
            for index in range(max(own.published, own.first_held), full):
                page = own.pages[index]
                if page is not None:
                    self.pool.publish(group, page, keys[index])
            own.published = max(own.published, full)

    def attach_prefix(self, held: list[SequencePages], keys: list[bytes], limit: int, media: SequenceOf[Span] = ()) -> int:
        """Take the longest cached prefix of at most `limit` tokens into an empty sequence; returns its length in tokens.

        It is the largest page boundary p for which every full group holds [0, p) and every windowed group [p-W+1, p), and
        which cuts no media that must stay whole.
        """
        if not self.enable_prefix_caching:
            return 0
        pages = min(limit // self.page_size, len(keys))
        for group in self.pool.groups:
            if group.shape.window is None:  # all of [0, p) is needed: p ends at the first page that is missing
                pages = next((i for i, key in enumerate(keys[:pages]) if key not in group.published), pages)
        whole = [(span.start, span.start + span.length) for span in media if span.whole]
        while pages and (
            any(start < pages * self.page_size < end for start, end in whole)
            or not all(self._holds(group, keys, pages) for group in self.pool.groups)
        ):
            pages -= 1
        for group, own in zip(self.pool.groups, held, strict=True):
            first = self._first_needed(group, pages)
            own.pages = [None] * first
            for key in keys[first:pages]:
                page = group.published[key]
                self.pool.retain(page)
                own.pages.append(page)
            own.first_held, own.published = first, pages
        return pages * self.page_size

    def _first_needed(self, group: Group, pages: int) -> int:
        window = group.shape.window
        return 0 if window is None else max(0, pages * self.page_size - window + 1) // self.page_size

    def _holds(self, group: Group, keys: list[bytes], pages: int) -> bool:
        """Whether a windowed group has its window before the boundary; full groups have been asked before."""
        return group.shape.window is None or all(
            key in group.published for key in keys[self._first_needed(group, pages) : pages]
        )


def page_keys(
    tokens: SequenceOf[int],
    page_size: int,
    known: list[bytes] = [],  # noqa: B006 (never changed)
    media: SequenceOf[Span] = (),
) -> list[bytes]:
    """Names of the full pages of a token list: a chain of hashes, so a page's name covers everything before it.

    Where placeholders of `media` lie it is their content that counts, all of it: what sees an image whole depends on its end.
    """
    keys = list(known)
    parent = keys[-1] if keys else b""
    for start in range(len(keys) * page_size, len(tokens) - page_size + 1, page_size):
        names: list[int | str] = list(tokens[start : start + page_size])
        for span in media:
            for position in range(max(start, span.start), min(start + page_size, span.start + span.length)):
                names[position - start] = f"{span.key}:{position - span.start}"
        content = ",".join(map(str, names)).encode()
        parent = hashlib.blake2b(content, digest_size=16, key=parent).digest()
        keys.append(parent)
    return keys
