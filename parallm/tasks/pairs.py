"""Two texts -> the tokens of one row: by a template, as the tokenizer joins them, or a completion after its prompt.

Only the second text is cut: the end of a row carries the answer.
"""

from collections.abc import Callable, Sequence

from parallm.errors import ContextTooLong, InvalidRequest
from parallm.model.adapters.adapter import REWARD
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.tasks.templates import DOCUMENT, INSTRUCTION
from parallm.types import TaskSpec

INSTRUCTION_PROMPT = "instruction"
"""Name of the prompt in `TaskSpec.prompts` that stands for a template's instruction."""
Row = tuple[int, ...]
Split = Callable[[str], tuple[Row, Row, Row]]
"""Returns the tokens before a document, of it and after it."""


def encode_pairs(
    tokenizer: ChatTokenizer,
    spec: TaskSpec,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str | None,
    limit: int,
    document_limit: int | None,
    cuts: bool,
) -> list[tuple[Row, int]]:
    """The tokens of each pair, at most `limit`, and how many of them belong to the query.

    A document of more than `document_limit` tokens is cut, and where it `cuts` one that does not fit into `limit`.
    Raises InvalidRequest for an instruction that the model has no place for, ContextTooLong.
    """
    split = _splitter(tokenizer, spec, query, instruction)
    pairs = []
    for document in documents:
        before, second, after = split(document)
        second = second[:document_limit]
        room = limit - len(before) - len(after)
        if room < 1 or (len(second) > room and not cuts):
            way_out = "shorten the query" if room < 1 else "shorten it, or let it be cut: truncate_prompt_tokens=-1"
            raise ContextTooLong(
                f"a query with its document has {len(before) + len(second) + len(after)} tokens, the limit is {limit}; "
                f"{way_out}",
                "query" if room < 1 else "documents",
                setting="engine.max_context",
            )
        pairs.append(((*before, *second[:room], *after), len(before)))
    return pairs


def _splitter(tokenizer: ChatTokenizer, spec: TaskSpec, query: str, instruction: str | None) -> Split:
    if instruction is not None and INSTRUCTION not in spec.template:
        raise InvalidRequest("the model's text of a pair has no place for an instruction; leave it out", "instruction")
    if spec.template:
        return _filler(tokenizer, spec, query, instruction)
    before, between, after = tokenizer.pair_frame
    if spec == REWARD:
        prompt, end = tokenizer.encode(query), (tokenizer.end_token,)
        return lambda document: (prompt, tokenizer.encode_more(document), end)
    first = (*before, *tokenizer.encode_more(query), *between)
    return lambda document: (first, tokenizer.encode_more(document), after)


def _filler(tokenizer: ChatTokenizer, spec: TaskSpec, query: str, instruction: str | None) -> Split:
    head, _, tail = spec.template.partition(DOCUMENT)
    fields = {"query": query}
    if INSTRUCTION in head:
        fields["instruction"] = spec.prompts.get(INSTRUCTION_PROMPT, "") if instruction is None else instruction
        if not fields["instruction"]:
            raise InvalidRequest("the model's text of a pair has an instruction; send one", "instruction")
    before, after = tokenizer.encode_filled(head, **fields), tokenizer.encode_more(tail)

    def split(document: str) -> tuple[Row, Row, Row]:
        # encoded together: a token may hold the end of the one and the beginning of the other
        whole = tokenizer.encode_filled(head + DOCUMENT, **fields, document=document)
        tokens = enumerate(zip(before, whole, strict=False))
        shared = next((index for index, (alone, joined) in tokens if alone != joined), len(before))
        return whole[:shared], whole[shared:], after

    return split
