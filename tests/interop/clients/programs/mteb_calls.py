"""MTEB's wrappers for servers, on tasks that the package makes in memory."""

import logging
from typing import Any

import mteb
from checking import MODEL, expect, report, server_and_model, task_servers
from mteb.mocks import mock_tasks
from mteb.models import OpenAIAPIEncodeWrapper, OpenAIAPIRerankWrapper

URL, _ = server_and_model()


def evaluate(model: Any, task: Any) -> float:
    results = mteb.evaluate(model, task, cache=None, show_progress_bar=False)
    return float(results.task_results[0].get_score())


def encoder() -> Any:
    return OpenAIAPIEncodeWrapper(URL, MODEL, modalities=["text"], use_chat_template=False)


def texts_are_retrieved_by_their_vectors() -> None:
    expect(0 < evaluate(encoder(), mock_tasks.MockRetrievalTask()) <= 1)


def sentences_are_compared() -> None:
    expect(-1 <= evaluate(encoder(), mock_tasks.MockSTSTask()) <= 1)


def documents_are_ranked() -> None:
    model = OpenAIAPIRerankWrapper(task_servers()["rerank"], MODEL, modalities=["text"])
    expect(0 < evaluate(model, mock_tasks.MockRerankingTask()) <= 1)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    report("mteb", [texts_are_retrieved_by_their_vectors, sentences_are_compared, documents_are_ranked])
