"""Infinity's own client for vectors, ranks and labels."""

from typing import Any

from checking import DOCUMENTS, MODEL, QUERY, expect, report, server_and_model, task_servers
from infinity_client import Client
from infinity_client.api.default import classify, embeddings, rerank
from infinity_client.models import ClassifyInput, OpenAIEmbeddingInputText, RerankInput

URL, _ = server_and_model()


def vectors_are_made() -> None:
    body = OpenAIEmbeddingInputText(input_=DOCUMENTS, model=MODEL)
    answer: Any = embeddings.sync(client=Client(base_url=URL), body=body)
    expect([one.index for one in answer.data] == [0, 1, 2], answer)
    expect(abs(sum(x * x for x in answer.data[0].embedding) - 1) < 1e-5, answer)


def documents_are_ranked() -> None:
    client = Client(base_url=task_servers()["rerank"])
    body = RerankInput(query=QUERY, documents=DOCUMENTS, model=MODEL, return_documents=True)
    answer: Any = rerank.sync(client=client, body=body)
    scores = [one.relevance_score for one in answer.results]
    expect(scores == sorted(scores, reverse=True) and 0 < scores[0] < 1, answer)
    expect([one.document for one in answer.results] == [DOCUMENTS[one.index] for one in answer.results], answer)


def raw_scores_are_logits() -> None:
    client = Client(base_url=task_servers()["rerank"])
    plain, raw = (
        rerank.sync(client=client, body=RerankInput(query=QUERY, documents=DOCUMENTS, model=MODEL, raw_scores=is_raw))
        for is_raw in (False, True)
    )
    expect(plain.results[0].relevance_score != raw.results[0].relevance_score, raw)


def texts_are_classified() -> None:
    client = Client(base_url=task_servers()["classify"])
    answer: Any = classify.sync(client=client, body=ClassifyInput(input_=DOCUMENTS, model=MODEL))
    expect([len(one) for one in answer.data] == [3, 3, 3], answer)
    expect({one.label for one in answer.data[0]} == {"bad", "so", "good"}, answer)
    expect(abs(sum(one.score for one in answer.data[0]) - 1) < 1e-5, answer)


if __name__ == "__main__":
    report("infinity-client", [vectors_are_made, documents_are_ranked, raw_scores_are_logits, texts_are_classified])
