"""Cohere's ClientV2 and Client with the address of a server that reranks."""

from typing import Any

import cohere
from checking import DOCUMENTS, MODEL, QUERY, expect, report, task_servers

URL = task_servers()["rerank"]


def rerank(client: Any, **fields: Any) -> Any:
    return client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, **fields)


def documents_are_ranked() -> None:
    answer = rerank(cohere.ClientV2("none", base_url=URL))
    scores = [one.relevance_score for one in answer.results]
    expect(sorted(one.index for one in answer.results) == [0, 1, 2] and scores == sorted(scores, reverse=True), answer)
    expect(answer.id and answer.meta.billed_units.search_units == 1, answer)


def only_the_best_are_answered() -> None:
    client = cohere.ClientV2("none", base_url=URL)
    best, every = rerank(client, top_n=1).results, rerank(client).results
    expect(len(best) == 1 and best[0].index == every[0].index, best)


def long_documents_are_cut() -> None:
    answer = rerank(cohere.ClientV2("none", base_url=URL), max_tokens_per_doc=2)
    expect(len(answer.results) == 3, answer)


def the_first_api_is_answered() -> None:
    answer = rerank(cohere.Client("none", base_url=URL), return_documents=True)
    expect(answer.results[0].document.text == DOCUMENTS[answer.results[0].index], answer)


def an_unknown_model_is_an_error_of_its_own_kind() -> None:
    try:
        cohere.ClientV2("none", base_url=URL).rerank(model="nobody", query=QUERY, documents=DOCUMENTS)
    except cohere.errors.NotFoundError:
        return
    raise AssertionError("accepted")


if __name__ == "__main__":
    report(
        "cohere",
        [
            documents_are_ranked,
            only_the_best_are_answered,
            long_documents_are_cut,
            the_first_api_is_answered,
            an_unknown_model_is_an_error_of_its_own_kind,
        ],
    )
