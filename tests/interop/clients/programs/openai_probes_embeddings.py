"""Probes of `/v1/embeddings`; `openai_probes.py` runs them."""

import openai
from openai_probes import MODEL, Client, bad, expect, probe, refused

TEXTS = ["12 + 3 =", "Mia has 3 apples."]


@probe
def vectors_come_in_the_order_of_their_texts(client: Client) -> None:
    both = client.embeddings.create(model=MODEL, input=TEXTS).data  # the client asks for base64 by itself
    expect([one.index for one in both] == [0, 1])
    for text, one in zip(TEXTS, both, strict=True):
        (alone,) = client.embeddings.create(model=MODEL, input=text).data
        far = max(abs(x - y) for x, y in zip(alone.embedding, one.embedding, strict=True))
        expect(far < 1e-5, far)
        expect(abs(sum(x * x for x in one.embedding) - 1) < 1e-5)


@probe
def vectors_as_numbers_are_those_as_bytes(client: Client) -> None:
    as_bytes = client.embeddings.create(model=MODEL, input=TEXTS)
    as_numbers = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    expect([one.embedding for one in as_numbers.data] == [one.embedding for one in as_bytes.data])
    expect(as_numbers.usage.prompt_tokens == as_numbers.usage.total_tokens > 0, as_numbers.usage)


@probe
def token_ids_are_encoded(client: Client) -> None:
    (one,) = client.embeddings.create(model=MODEL, input=[5, 6, 7]).data
    more = client.embeddings.create(model=MODEL, input=[[5, 6, 7], [8]]).data
    expect(max(abs(x - y) for x, y in zip(one.embedding, more[0].embedding, strict=True)) < 1e-5)


@probe
def sizes_are_kept_or_refused(client: Client) -> None:
    size = len(client.embeddings.create(model=MODEL, input="a").data[0].embedding)
    expect(len(client.embeddings.create(model=MODEL, input="a", dimensions=size).data[0].embedding) == size)
    bad("dimensions", lambda: client.embeddings.create(model=MODEL, input="a", dimensions=size - 1))
    bad("dimensions", lambda: client.embeddings.create(model=MODEL, input="a", dimensions=size + 1))


@probe
def wrong_inputs_of_vectors_are_refused(client: Client) -> None:
    bad("input", lambda: client.embeddings.create(model=MODEL, input=""))
    bad("input", lambda: client.embeddings.create(model=MODEL, input=[]))
    bad("input", lambda: client.embeddings.create(model=MODEL, input=[99_999]))
    bad("input", lambda: client.embeddings.create(model=MODEL, input="apple " * 20_000))
    refused(openai.NotFoundError, "model", lambda: client.embeddings.create(model="nope", input="a"))
