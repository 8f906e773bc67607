"""Two texts -> the tokens of one row: by a template, as the tokenizer joins them, or a completion after its prompt.

Only the second text is cut: the end of a row carries the answer.
"""

from parallm.errors import ContextTooLong, InvalidRequest
from parallm.model.adapters.adapter import REWARD
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.tasks.templates import INSTRUCTION
from parallm.types import TaskSpec

INSTRUCTION_PROMPT = "instruction"
"""Name of the prompt in `TaskSpec.prompts` that stands for a template's instruction."""
Row = tuple[int, ...]


def encode_pair(
    tokenizer: ChatTokenizer,
    spec: TaskSpec,
    query: str,
    document: str,
    *,
    instruction: str | None,
    limit: int,
    document_limit: int | None,
    cuts: bool,
) -> tuple[Row, int]:
    """The tokens of a pair, at most `limit`, and how many of them belong to the first text.

    A document of more than `document_limit` tokens is cut, and where it `cuts` one that does not fit into `limit`.
    Raises InvalidRequest for an instruction that the model has no place for, ContextTooLong.
    """
    before, second, after = _parts(tokenizer, spec, query, document, instruction)
    second = second[:document_limit]
    room = limit - len(before) - len(after)
    if room < 1 or (len(second) > room and not cuts):
        name = "query" if room < 1 else "documents"
        way_out = "shorten the query" if room < 1 else "shorten it, or let it be cut: truncate_prompt_tokens=-1"
        raise ContextTooLong(
            f"a query with its document has {len(before) + len(second) + len(after)} tokens, the limit is {limit}; "
            f"{way_out}",
            name,
            setting="engine.max_context",
        )
    return (*before, *second[:room], *after), len(before)


def _parts(
    tokenizer: ChatTokenizer, spec: TaskSpec, query: str, document: str, instruction: str | None
) -> tuple[Row, Row, Row]:
    """Tokens before the second text, of it and after it."""
    if instruction is not None and INSTRUCTION not in spec.template:
        raise InvalidRequest("the model's text of a pair has no place for an instruction; leave it out", "instruction")
    if spec.template:
        return _filled(tokenizer, spec, query, document, instruction)
    if spec == REWARD:
        return tokenizer.encode(query), tokenizer.encode_more(document), (tokenizer.end_token,)
    before, between, after = tokenizer.pair_frame
    return (*before, *tokenizer.encode_more(query), *between), tokenizer.encode_more(document), after


def _filled(
    tokenizer: ChatTokenizer, spec: TaskSpec, query: str, document: str, instruction: str | None
) -> tuple[Row, Row, Row]:
    head, _, tail = spec.template.partition("{document}")
    if instruction is None and INSTRUCTION in head:
        instruction = spec.prompts.get(INSTRUCTION_PROMPT)
        if instruction is None:
            raise InvalidRequest("the model's text of a pair has an instruction; send one", "instruction")
    fields = {"instruction": instruction, "query": query} if instruction is not None else {"query": query}
    before = tokenizer.encode_filled(head, **fields)
    # encoded together: a token may hold the end of the one and the beginning of the other
    whole = tokenizer.encode_filled(head + "{document}", **fields, document=document)
    tokens = enumerate(zip(before, whole, strict=False))
    shared = next((index for index, (alone, joined) in tokens if alone != joined), len(before))
    return whole[:shared], whole[shared:], tokenizer.encode_more(tail)
