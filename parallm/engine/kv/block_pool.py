"""Bookkeeping of pages of keys and values: a free list, reference counts, and the tokens of pages that are full.

As vLLM's block pool (https://arxiv.org/abs/2309.06180). A page that is full never changes, so any number of sequences
share it. A page without references keeps its contents until others need it, the one that was freed first before
all: prompts that begin with the same tokens find it by a chain of hashes, each of a page's tokens and the hash before.
The arrays are in `engine/paged_memory.py`.
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from parallm.engine.kv.prefix_cache import Owner, Tokens

FIRST_PAGES = 128
"""Pages of a pool at first. When too few are free, and up to half of what it may have before cached ones go, it doubles
at once until what waits for pages fits."""
SCRATCH = 0
"""The page that rows without a sequence write to. Nothing reads it, and no table holds it."""


class BlockTable:
    """The pages of a sequence, in order of its positions. They are freed with the last reference to the table."""

    def __init__(self, pool: "BlockPool", pages: list[int]) -> None:
        """`pages` were allocated or shared for this table."""
        self.pages = pages
        self.num_cached = 0
        """First pages that came from the prefix cache: others may hold them, so they must not be written."""
        self._pool = pool

    def share_first(self, pages: Sequence[int]) -> None:
        """Hold these cached pages in place of as many of the first ones."""
        self._pool.share(pages)
        replaced, self.num_cached = self.pages[: len(pages)], len(pages)
        self.pages[: len(pages)] = pages
        self._pool.release(replaced)

    def __del__(self) -> None:
        self._pool.release(self.pages)


class BlockPool:
    """Used on the device thread; only `release` may be called on others."""

    def __init__(self, max_pages: int, page: int, page_bytes: int, num_awaited: Callable[[], int] = lambda: 0) -> None:
        """Page numbers are 1 to `max_pages` - 1, after the scratch page; each has `page` positions and `page_bytes`.
        `num_awaited`: pages that are sure to be allocated soon, asked when the pool grows."""
        self.max_pages = max_pages
        self.num_pages = min(max_pages, FIRST_PAGES)
        """Pages that must exist, the scratch page included."""
        self.page = page
        self.page_bytes = page_bytes
        self.num_lookups = 0
        self.num_hits = 0
        self._num_awaited = num_awaited
        self._free = OrderedDict.fromkeys(range(1, self.num_pages))  # the next one to allocate first
        self._counts = [0] * max_pages  # tables that hold each page
        self._released: deque[list[int]] = deque()  # tables may die on any thread, by the garbage collector
        self._pages: dict[Owner, dict[bytes, int]] = {}  # cached pages by the hash of all tokens up to their end
        self._keys: dict[int, tuple[Owner, bytes]] = {}  # the inverse
        self._num_kept = 0  # cached pages that are free

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, cached ones and those that do not exist yet included."""
        while self._released:
            self._drop(self._released.popleft())
        return len(self._free) + self.max_pages - self.num_pages

    @property
    def num_used(self) -> int:
        """Pages that tables hold."""
        return self.max_pages - 1 - self.num_free

    @property
    def nbytes(self) -> int:
        """Bytes of cached pages that no table holds."""
        return self._num_kept * self.page_bytes

    def num_held(self, pages: Sequence[int]) -> int:
        """Pages among these that tables hold."""
        return sum(self._counts[page] > 0 for page in pages)

    def allocate(self, count: int) -> list[int] | None:
        """Pages for a new table, with any contents; None where fewer are free."""
        if count > self.num_free:
            return None
        if self._num_ready(self.num_pages) < count:
            self._grow(max(count, self._num_awaited()))
        pages = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in pages:
            self._counts[page] = 1
            self._uncache(page)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Let one more table hold these pages, which are cached or held."""
        assert self.num_free >= 0  # whatever was released is in the list of free pages now
        for page in pages:
            self._num_kept -= self._counts[page] == 0
            self._free.pop(page, None)
            self._counts[page] += 1

    def release(self, pages: list[int]) -> None:
        """Let one table less hold these pages. Any thread."""
        self._released.append(pages)

    def match(self, owner: Owner, tokens: Tokens, max_tokens: int) -> list[int]:
        """The cached pages of the first `max_tokens` of `tokens`, from the first one on."""
        cached, pages = self._pages.get(owner, {}), []
        for key in self._chain(tokens[:max_tokens]) if cached else ():
            if key not in cached:
                break
            pages.append(cached[key])
        return pages

    def count_lookup(self, is_hit: bool) -> None:
        self.num_lookups += 1
        self.num_hits += is_hit

    def cache(self, owner: Owner, tokens: Tokens, pages: Sequence[int]) -> None:
        """Let later prompts find the full ones of these pages, which hold the keys and values of `tokens`."""
        cached = self._pages.setdefault(owner, {})
        for key, page in zip(self._chain(tokens), pages, strict=False):
            if key not in cached and page not in self._keys:
                cached[key], self._keys[page] = page, (owner, key)

    def forget(self, is_servable: Callable[[str, int], bool]) -> None:
        """Forget what adapter versions have computed that `is_servable` denies."""
        for owner in [owner for owner in self._pages if owner.name and not is_servable(owner.name, owner.version)]:
            self._forget(owner)

    def clear(self) -> None:
        """Forget what all pages hold."""
        for owner in list(self._pages):
            self._forget(owner)

    def _num_ready(self, num_pages: int) -> int:
        """Pages to allocate before cached ones go, if the pool had `num_pages`."""
        spared = self._num_kept if 2 * num_pages < self.max_pages else 0
        return len(self._free) + num_pages - self.num_pages - spared

    def _grow(self, count: int) -> None:
        """Double the pages until `count` are ready; the new ones are allocated next."""
        grown = self.num_pages
        while grown < self.max_pages and self._num_ready(grown) < count:
            grown = min(self.max_pages, 2 * grown)
        for page in reversed(range(self.num_pages, grown)):
            self._free[page] = None
            self._free.move_to_end(page, last=False)
        self.num_pages = grown

    def _forget(self, owner: Owner) -> None:
        for page in self._pages.pop(owner).values():
            del self._keys[page]
            if page in self._free:
                self._num_kept -= 1
                self._free.move_to_end(page, last=False)

    def _uncache(self, page: int) -> None:
        if page in self._keys:
            owner, key = self._keys.pop(page)
            del self._pages[owner][key]
            self._num_kept -= 1

    def _drop(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):  # so that a beginning stays longer than its end
            self._counts[page] -= 1
            if self._counts[page] == 0:
                self._free[page] = None
                if page in self._keys:
                    self._num_kept += 1
                else:
                    self._free.move_to_end(page, last=False)

    def _chain(self, tokens: Tokens) -> Iterator[bytes]:
        """The hash of each full page, and of all before it: no other tokens have it."""
        key = b""
        for start in range(0, len(tokens) - self.page + 1, self.page):
            values = array("q", tokens[start : start + self.page])
            key = hashlib.blake2b(key + values.tobytes(), digest_size=16).digest()
            yield key
