"""Hugging Face's InferenceClient with the addresses of Text Embeddings Inference's routes."""

import os

import numpy as np
from checking import DOCUMENTS, QUERY, expect, report, server_and_model

os.environ["HF_HUB_OFFLINE"] = "0"  # it would not even ask this machine

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

URL, _ = server_and_model()


def vectors_are_made() -> None:
    vectors = InferenceClient(model=f"{URL}/embed").feature_extraction(DOCUMENTS[0])
    expect(vectors.shape[0] == 1 and abs(np.linalg.norm(vectors) - 1) < 1e-5, vectors.shape)


def vectors_are_as_long_as_they_are() -> None:
    vectors = InferenceClient(model=f"{URL}/embed").feature_extraction(
        DOCUMENTS[0], normalize=False, truncate=True, truncation_direction="right"
    )
    expect(abs(np.linalg.norm(vectors) - 1) > 1e-3, np.linalg.norm(vectors))


def sentences_are_compared() -> None:
    client = InferenceClient(model=f"{URL}/similarity")
    scores = client.sentence_similarity(QUERY, other_sentences=[QUERY, *DOCUMENTS])
    expect(len(scores) == 4 and abs(scores[0] - 1) < 1e-5 and max(scores[1:]) < scores[0], scores)


def a_wrong_request_is_an_error_with_its_reason() -> None:
    try:
        InferenceClient(model=f"{URL}/embed").feature_extraction("")
    except HfHubHTTPError as error:
        expect("422" in str(error), error)
        return
    raise AssertionError("accepted")


if __name__ == "__main__":
    report(
        "huggingface_hub",
        [
            vectors_are_made,
            vectors_are_as_long_as_they_are,
            sentences_are_compared,
            a_wrong_request_is_an_error_with_its_reason,
        ],
    )
