"""The texts of a query and a document, and the words of the answer, of families of rerankers.

Such models are language models: nothing in their folders says how they ask. The texts are those of their model cards.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from parallm.errors import ModelError

QUERY, DOCUMENT, INSTRUCTION = "{query}", "{document}", "{instruction}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    template: str
    answers: tuple[str, ...]
    """The word of a document that fits, and that of others, if there is one."""
    instruction: str = ""
    """Stands for {instruction} where a request has none."""


FAMILIES: Mapping[str, Family] = {
    "qwen3_reranker": Family(
        template=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        answers=("yes", "no"),
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
    "mxbai_rerank_v2": Family(
        template=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nquery: {query}\ndocument: {document}\nYou are a search relevance expert who evaluates "
            "how well documents match search queries. For each query-document pair, carefully analyze the semantic "
            "relationship between them, then provide your binary relevance judgment (0 for not relevant, 1 for "
            "relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
        ),
        answers=("1", "0"),
    ),
}


def family_of(template: str) -> Family:
    """The family of this name, or one without answers for the text of a template. Raises ModelError."""
    if template in FAMILIES:
        return FAMILIES[template]
    if any(template.count(field) != 1 for field in (QUERY, DOCUMENT)) or template.count(INSTRUCTION) > 1:
        raise ModelError(
            f"tasks.score_template is {template[:100]!r}; it should be one of {', '.join(FAMILIES)}, or a text with "
            f"{QUERY} and {DOCUMENT} once each, perhaps {INSTRUCTION}"
        )
    if template.index(QUERY) > template.index(DOCUMENT) or INSTRUCTION in template.partition(DOCUMENT)[2]:
        raise ModelError(
            f"tasks.score_template: {DOCUMENT} should come after {QUERY} and {INSTRUCTION}, since it is cut"
        )
    return Family(template=template, answers=())
