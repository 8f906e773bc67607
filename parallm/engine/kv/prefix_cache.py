"""Keys and values of computed tokens, for prompts that begin with the same ones.

A radix tree for each adapter version and salt, over blocks of 16 tokens. A node holds a run of blocks; where another
prompt diverges, a child goes on. The least recently used leaf is evicted first, and before all others the nodes of
adapter versions that no request can name any more.

Axes: N layers' keys and values, B rows, H key-value heads, T positions, D head size.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.engine.kv.shapes import BLOCK
from parallm.model.adapters.adapter import Adapter

Tokens = Sequence[int]
Block = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Owner:
    """Namespace of keys and values: each adapter computes its own, and a salt keeps users apart."""

    name: str
    version: int
    salt: str

    @classmethod
    def of(cls, adapter: Adapter | None, salt: str) -> "Owner":
        return cls("", 0, salt) if adapter is None else cls(adapter.name, adapter.version, salt)


@dataclass(slots=True, eq=False)
class Node:
    parent: "Node | None"
    owner: Owner
    at: int
    """Blocks of the parent before it."""
    blocks: list[Block]
    arrays: list[mx.array]
    """Keys and values, (N, H, T, D), see `row_copies`."""
    children: dict[tuple[int, Block], "Node"] = field(default_factory=dict)
    """Keyed by the number of this node's blocks before them, and their first block."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix of a prompt."""

    num_tokens: int
    pieces: list[list[mx.array]]
    """Keys and values, (N, H, T, D), of each run of positions."""

    def arrays(self) -> list[mx.array]:
        """All positions together."""
        return [mx.concatenate(parts, axis=2) for parts in zip(*self.pieces, strict=True)]


class PrefixCache:
    """Used on the device thread; any thread may read its numbers."""

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self.num_lookups = 0
        self.num_hits = 0
        self.limit = limit
        """In bytes."""
        self._roots: dict[Owner, Node] = {}
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # a node comes before its parent, so the first is a leaf

    def match(self, owner: Owner, tokens: Tokens, max_tokens: int) -> Hit | None:
        """The longest cached prefix of the first `max_tokens` of `tokens`."""
        self.num_lookups += 1
        path = self._walk(owner, tokens[: max_tokens // BLOCK * BLOCK])
        num_blocks = _num_blocks(path)
        if num_blocks == 0:
            return None
        self.num_hits += 1
        self._touch(path[-1][0])
        pieces = [[array[:, :, : used * BLOCK] for array in node.arrays] for node, used in path if used]
        return Hit(num_blocks * BLOCK, pieces)

    def num_cached(self, owner: Owner, tokens: Tokens, max_tokens: int) -> int:
        """Tokens that `match` would find; does not count as a use."""
        return _num_blocks(self._walk(owner, tokens[: max_tokens // BLOCK * BLOCK])) * BLOCK

    def add(
        self, owner: Owner, tokens: Tokens, copy: Callable[[int, int], list[mx.array]], per_token: int, num_free: int
    ) -> list[mx.array]:
        """Cache the whole blocks of `tokens` that are not cached yet, of which `copy(start, end)` makes copies.

        `num_free` is how many more bytes may be held. Returns the copies; evaluate them before their source changes.
        """
        path = self._walk(owner, tokens)
        num_cached = _num_blocks(path)
        num_blocks = len(tokens) // BLOCK
        needed = (num_blocks - num_cached) * BLOCK * per_token
        if num_blocks == num_cached or needed > self.limit:
            return []
        if path:
            self._touch(path[-1][0])
        on_path = {node for node, _ in path}
        if not self._shrink(max(self.nbytes + needed - self.limit, needed - num_free), on_path):
            return []
        parent, at = path[-1] if path else (self._root(owner), 0)
        start, end = num_cached * BLOCK, num_blocks * BLOCK
        arrays = copy(start, end)
        node = Node(parent, owner, at, _blocks(tokens[start:end]), arrays)
        parent.children[at, node.blocks[0]] = node
        self._nodes[node] = None
        self._touch(node)
        self.nbytes += node.nbytes
        return arrays

    def shrink(self, num_bytes: int) -> bool:
        """Evict at least `num_bytes`; False if it holds less."""
        return self._shrink(num_bytes, set())

    def forget(self, is_servable: Callable[[str, int], bool]) -> None:
        """Evict adapter versions that `is_servable` denies."""
        gone = {owner for owner in self._roots if owner.name and not is_servable(owner.name, owner.version)}
        if gone:
            for node in [node for node in self._nodes if node.owner in gone]:
                self._remove(node)
            for owner in gone:
                del self._roots[owner]

    def clear(self) -> None:
        self._roots.clear()
        self._nodes.clear()
        self.nbytes = 0

    def _shrink(self, num_bytes: int, spared: set[Node]) -> bool:
        while num_bytes > 0:
            oldest = next((node for node in self._nodes if node not in spared and not node.children), None)
            if oldest is None:
                return False
            num_bytes -= oldest.nbytes
            self._remove(oldest)
        return True

    def _remove(self, node: Node) -> None:
        del self._nodes[node]
        self.nbytes -= node.nbytes
        assert node.parent is not None
        del node.parent.children[node.at, node.blocks[0]]

    def _walk(self, owner: Owner, tokens: Tokens) -> list[tuple[Node, int]]:
        """The nodes along `tokens`, root first, and the number of matching blocks of each."""
        blocks, position = _blocks(tokens), 0
        path: list[tuple[Node, int]] = []
        node = self._roots.get(owner)
        while node is not None:
            used = 0
            while used < len(node.blocks) and position < len(blocks) and node.blocks[used] == blocks[position]:
                used, position = used + 1, position + 1
            path.append((node, used))
            node = node.children.get((used, blocks[position])) if position < len(blocks) else None
        return path

    def _touch(self, node: Node | None) -> None:
        while node is not None and node.parent is not None:
            self._nodes.move_to_end(node)
            node = node.parent

    def _root(self, owner: Owner) -> Node:
        return self._roots.setdefault(owner, Node(None, owner, 0, [], []))


def _num_blocks(path: Sequence[tuple[Node, int]]) -> int:
    return sum(used for _, used in path)


def _blocks(tokens: Tokens) -> list[Block]:
    return [tuple(tokens[start : start + BLOCK]) for start in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def row_copies(layers_1HTD: Sequence[mx.array]) -> list[mx.array]:
    """A copy of one row's keys and values in one array, (N, H, T, D); with unequal shapes one each, N = 1."""
    if _are_alike(layers_1HTD):
        return [mx.concatenate(list(layers_1HTD))]
    return [mx.contiguous(array) for array in layers_1HTD]


def stacks_of(layers_BHTD: Sequence[mx.array]) -> list[mx.array]:
    """Keys and values of several rows, (N, B, H, T, D), in the form of `row_copies`."""
    return [mx.stack(list(layers_BHTD))] if _are_alike(layers_BHTD) else [array[None] for array in layers_BHTD]


def layers_of(rows: Sequence[Sequence[mx.array]]) -> list[mx.array]:
    """Keys and values of each layer in turn, (B, H, T, D), from the `row_copies` of B rows."""
    stacks = [mx.stack(list(copies), axis=1) for copies in zip(*rows, strict=True)]
    return [stack[layer] for stack in stacks for layer in range(stack.shape[0])]


def _are_alike(arrays: Sequence[mx.array]) -> bool:
    return all(array.shape == arrays[0].shape and array.dtype == arrays[0].dtype for array in arrays)
