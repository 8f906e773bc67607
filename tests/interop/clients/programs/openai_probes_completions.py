"""Probes of models and `/v1/completions`, and of errors that all endpoints share."""

import openai
from openai_probes import Client, bad, complete, expect, honoured, probe, refused, text_of


@probe
def models_are_listed(client: Client) -> None:
    names = [model.id for model in client.models.list()]
    expect("base" in names, names)


@probe
def a_model_is_retrieved(client: Client) -> None:
    model = client.models.retrieve("base")
    expect(model.id == "base" and model.object == "model" and model.created > 0, model)


@probe
def an_unknown_model_is_not_found(client: Client) -> None:
    refused(openai.NotFoundError, None, lambda: client.models.retrieve("nope"))
    refused(openai.NotFoundError, "model", lambda: complete(client, model="nope"))


@probe
def a_string_is_continued(client: Client) -> None:
    answer = complete(client)
    expect(answer.object == "text_completion" and answer.choices[0].text and answer.id.startswith("cmpl-"), answer)


@probe
def usage_adds_up(client: Client) -> None:
    usage = complete(client).usage
    expect(usage.prompt_tokens > 0 and usage.prompt_tokens + usage.completion_tokens == usage.total_tokens, usage)


@probe
def strings_are_continued_in_order(client: Client) -> None:
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in ("12 + 3 =", "40 - 2 =")]
    together = complete(client, prompt=["12 + 3 =", "40 - 2 ="]).choices
    expect([choice.text for choice in together] == alone and [c.index for c in together] == [0, 1], together)


@probe
def token_ids_are_continued(client: Client) -> None:
    ids = complete(client, extra_body={"return_token_ids": True}).choices[0].model_extra["prompt_token_ids"]
    expect(complete(client, prompt=ids).choices[0].text == complete(client).choices[0].text)
    expect(len(complete(client, prompt=[ids, ids]).choices) == 2)


@probe
def n_gives_choices(client: Client) -> None:
    answer = complete(client, n=3, temperature=1)
    expect([choice.index for choice in answer.choices] == [0, 1, 2], answer)


@probe
def max_tokens_ends_a_text(client: Client) -> None:
    answer = complete(client, max_tokens=2)
    expect(answer.usage.completion_tokens == 2 and answer.choices[0].finish_reason == "length", answer)


@probe
def temperature_zero_repeats(client: Client) -> None:
    expect(complete(client).choices[0].text == complete(client).choices[0].text)


@probe
def a_seed_repeats(client: Client) -> None:
    texts = {complete(client, temperature=1, seed=7, max_tokens=20).choices[0].text for _ in range(3)}
    expect(len(texts) == 1, texts)


@probe
def top_p_is_honoured(client: Client) -> None:
    expect(complete(client, temperature=1, top_p=1e-6).choices[0].text == complete(client).choices[0].text)


@probe
def a_stop_string_is_cut_off(client: Client) -> None:
    whole = complete(client, max_tokens=20).choices[0].text
    stop = whole[3:5]
    choice = complete(client, max_tokens=20, stop=[stop]).choices[0]
    expect(choice.text == whole[: whole.index(stop)] and choice.finish_reason == "stop", choice)
    expect(complete(client, max_tokens=20, stop=stop).choices[0].text == choice.text)


@probe
def logprobs_are_those_of_the_tokens(client: Client) -> None:
    choice = complete(client, logprobs=2).choices[0]
    told = choice.logprobs
    expect("".join(told.tokens).startswith(choice.text), told)
    expect(len(told.token_logprobs) == len(told.tokens) == len(told.text_offset) == len(told.top_logprobs), told)
    expect(all(value <= 0 for value in told.token_logprobs), told)
    expect(all(2 <= len(top) <= 3 for top in told.top_logprobs), told)


@probe
def no_logprobs_without_asking(client: Client) -> None:
    expect(complete(client).choices[0].logprobs is None)


@probe
def a_stream_says_the_same(client: Client) -> None:
    chunks = list(complete(client, stream=True))
    expect(text_of(chunks) == complete(client).choices[0].text, chunks)
    expect(chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks[-1])


@probe
def a_stream_tells_usage_when_asked(client: Client) -> None:
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    expect(chunks[-1].usage.total_tokens == complete(client).usage.total_tokens and not chunks[-1].choices, chunks[-1])
    expect(all(chunk.usage is None for chunk in chunks[:-1]))


@probe
def a_stream_has_logprobs(client: Client) -> None:
    chunks = list(complete(client, stream=True, logprobs=1))
    tokens = [
        token for chunk in chunks for choice in chunk.choices if choice.logprobs for token in choice.logprobs.tokens
    ]
    expect(tokens == complete(client, logprobs=1).choices[0].logprobs.tokens, tokens)


@probe
def a_stream_of_several_choices_keeps_them_apart(client: Client) -> None:
    chunks = list(complete(client, stream=True, n=2, temperature=1, seed=3))
    whole = complete(client, n=2, temperature=1, seed=3)
    expect([text_of(chunks, index) for index in (0, 1)] == [choice.text for choice in whole.choices], chunks)


@probe
def a_stream_may_be_left(client: Client) -> None:
    stream = complete(client, stream=True, max_tokens=60)
    next(iter(stream))
    stream.close()
    expect(complete(client).choices)


@probe
def user_changes_nothing(client: Client) -> None:
    expect(complete(client, user="somebody").choices[0].text == complete(client).choices[0].text)


@probe
def echo_gives_the_prompt_or_is_refused(client: Client) -> None:
    honoured("echo", lambda: complete(client, echo=True), lambda answer: answer.choices[0].text.startswith("12 + 3 ="))


@probe
def suffix_is_refused(client: Client) -> None:
    bad("suffix", lambda: complete(client, suffix="the end"))


@probe
def best_of_is_honoured_or_refused(client: Client) -> None:
    call = lambda: complete(client, best_of=3, n=1, temperature=1, logprobs=0)  # noqa: E731
    honoured("best_of", call, lambda answer: len(answer.choices) == 1 and answer.usage.completion_tokens > 8)


@probe
def logit_bias_is_honoured_or_refused(client: Client) -> None:
    ids = complete(client, extra_body={"return_token_ids": True}).choices[0].model_extra["token_ids"]
    first = complete(client, max_tokens=1).choices[0].text
    call = lambda: complete(client, max_tokens=1, logit_bias={str(ids[0]): -100})  # noqa: E731
    honoured("logit_bias", call, lambda answer: answer.choices[0].text != first)


@probe
def a_presence_penalty_is_honoured_or_refused(client: Client) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    call = lambda: complete(client, max_tokens=40, presence_penalty=2)  # noqa: E731
    honoured("presence_penalty", call, lambda answer: answer.choices[0].text != whole)


@probe
def a_frequency_penalty_is_honoured_or_refused(client: Client) -> None:
    whole = complete(client, max_tokens=40).choices[0].text
    call = lambda: complete(client, max_tokens=40, frequency_penalty=2)  # noqa: E731
    honoured("frequency_penalty", call, lambda answer: answer.choices[0].text != whole)


@probe
def values_out_of_range_are_refused(client: Client) -> None:
    for name, value in {"temperature": 3, "top_p": 2, "n": 0, "max_tokens": 0, "logprobs": 1000, "seed": -1}.items():
        bad(name, lambda name=name, value=value: complete(client, **{name: value}))  # type: ignore[misc]


@probe
def values_of_wrong_types_are_refused(client: Client) -> None:
    for name, value in {"temperature": "hot", "prompt": {"a": 1}, "stop": [5], "stream": "yes", "n": "2"}.items():
        bad(name, lambda name=name, value=value: complete(client, extra_body={name: value}))  # type: ignore[misc]


@probe
def an_unknown_field_is_refused(client: Client) -> None:
    bad("no_such_field", lambda: complete(client, extra_body={"no_such_field": 1}))


@probe
def a_prompt_that_is_too_long_says_so(client: Client) -> None:
    try:
        complete(client, prompt="1" * 20_000)
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", error)
        return
    raise AssertionError("accepted")


@probe
def an_unknown_path_is_not_found(client: Client) -> None:
    refused(openai.NotFoundError, None, lambda: client.post("/nope", cast_to=object, body={}))


@probe
def a_stream_that_cannot_begin_is_an_ordinary_error(client: Client) -> None:
    refused(openai.NotFoundError, "model", lambda: complete(client, model="nope", stream=True))
