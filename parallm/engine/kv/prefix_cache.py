"""Keys and values of computed tokens, for prompts that begin with the same ones.

A radix tree for each adapter version and salt, over blocks of 16 tokens. A node holds a run of blocks; where another
prompt leaves it, a child goes on. The least recently used leaf goes first, and before all others what belongs to a
version that nobody can ask for any more.

Axes: N layers' keys and values, H key-value heads, T positions, D head size.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.engine.kv.cost import BLOCK
from parallm.model.adapters.adapter import Adapter

Tokens = Sequence[int]
Block = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose keys and values: different adapters compute different ones, and a salt keeps users apart."""

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
    """Of keys and values, (N, H, T, D), see `kv_stack`."""
    children: dict[tuple[int, Block], "Node"] = field(default_factory=dict)
    """By how many of this node's blocks come before them, and their first block."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known beginning of a prompt."""

    num_tokens: int
    pieces: list[list[mx.array]]
    """Keys and values, (N, H, T, D), of each run of positions."""

    def arrays(self) -> list[mx.array]:
        """All positions together."""
        return [mx.concatenate(parts, axis=2) for parts in zip(*self.pieces, strict=True)]


class PrefixCache:
    """Used on the device thread; its numbers from any."""

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self.num_lookups = 0
        self.num_hits = 0
        self.limit = limit
        """In bytes."""
        self._roots: dict[Owner, Node] = {}
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # a node comes before its parent, so the first is a leaf

    def match(self, owner: Owner, tokens: Tokens, most: int) -> Hit | None:
        """What is known of the first `most` of `tokens`."""
        self.num_lookups += 1
        path = self._walk(owner, tokens[: most // BLOCK * BLOCK])
        num_blocks = _num_blocks(path)
        if num_blocks == 0:
            return None
        self.num_hits += 1
        self._touch(path[-1][0])
        pieces = [[array[:, :, : used * BLOCK] for array in node.arrays] for node, used in path if used]
        return Hit(num_blocks * BLOCK, pieces)

    def num_known(self, owner: Owner, tokens: Tokens, most: int) -> int:
        """How many tokens `match` would find; that does not count as a use."""
        return _num_blocks(self._walk(owner, tokens[: most // BLOCK * BLOCK])) * BLOCK

    def add(
        self, owner: Owner, tokens: Tokens, make: Callable[[int, int], list[mx.array]], per_token: int, room: int
    ) -> list[mx.array]:
        """Keep the whole blocks of `tokens` that are not known yet, of which `make(start, end)` gives copies.

        `room` is how many bytes more may be held. Returns the copies, to be evaluated before what they are of changes.
        """
        path = self._walk(owner, tokens)
        known = _num_blocks(path)
        whole = len(tokens) // BLOCK
        needed = (whole - known) * BLOCK * per_token
        if whole == known or needed > self.limit:
            return []
        if path:
            self._touch(path[-1][0])
        on_path = {node for node, _ in path}
        if not self._shrink(max(self.nbytes + needed - self.limit, needed - room), on_path):
            return []
        parent = path[-1] if path else (self._root(owner), 0)
        arrays = make(known * BLOCK, whole * BLOCK)
        node = Node(parent[0], owner, parent[1], _blocks(tokens[known * BLOCK : whole * BLOCK]), arrays)
        parent[0].children[node.at, node.blocks[0]] = node
        self._nodes[node] = None
        self._touch(node)
        self.nbytes += node.nbytes
        return arrays

    def shrink(self, num_bytes: int) -> bool:
        """Give back at least so many bytes; False if there were not as many."""
        return self._shrink(num_bytes, set())

    def forget(self, is_known: Callable[[str, int], bool]) -> None:
        """Drop what belongs to adapter versions that `is_known` denies."""
        gone = {owner for owner in self._roots if owner.name and not is_known(owner.name, owner.version)}
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
        """The nodes that `tokens` begin with, root first, and how many blocks of each."""
        blocks, place = _blocks(tokens), 0
        path: list[tuple[Node, int]] = []
        node = self._roots.get(owner)
        while node is not None:
            used = 0
            while used < len(node.blocks) and place < len(blocks) and node.blocks[used] == blocks[place]:
                used, place = used + 1, place + 1
            path.append((node, used))
            node = node.children.get((used, blocks[place])) if place < len(blocks) else None
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
    """A copy of one row's keys and values, (N, H, T, D); or of each array, N = 1, where they are not alike."""
    if _are_alike(layers_1HTD):
        return [mx.concatenate(list(layers_1HTD))]
    return [mx.contiguous(array) for array in layers_1HTD]


def stacks_of(layers_BHTD: Sequence[mx.array]) -> list[mx.array]:
    """Keys and values of several rows, (N, B, H, T, D), as `row_copies` has those of one row."""
    return [mx.stack(list(layers_BHTD))] if _are_alike(layers_BHTD) else [array[None] for array in layers_BHTD]


def layers_of(rows: Sequence[Sequence[mx.array]]) -> list[mx.array]:
    """Keys and values of each layer in turn, (B, H, T, D), of rows that `row_copies` made."""
    stacks = [mx.stack(list(copies), axis=1) for copies in zip(*rows, strict=True)]
    return [stack[layer] for stack in stacks for layer in range(stack.shape[0])]


def _are_alike(arrays: Sequence[mx.array]) -> bool:
    return all(array.shape == arrays[0].shape and array.dtype == arrays[0].dtype for array in arrays)
