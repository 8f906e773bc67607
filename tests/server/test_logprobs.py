from parallm.server.openai.logprobs import chat_logprobs, completion_logprobs
from parallm.types import TokenEvent, TopLogprob


def half_characters(token: int) -> str:
    """Return the text of a token: 1 and 2 are parts of characters, all others are an accented letter."""
    return "\ufffd" if token in (1, 2) else "\u00e9"


def event(token: int, *top: TopLogprob) -> TokenEvent:
    return TokenEvent(request_id="1", index=0, tokens=(token,), logprobs=(-2.0,), top_logprobs=(top,), text="")


def test_a_part_of_a_character_has_no_bytes() -> None:
    assert chat_logprobs(event(1), half_characters).content[0].bytes is None
    assert chat_logprobs(event(3), half_characters).content[0].bytes == [0xC3, 0xA9]


def test_of_tokens_with_one_text_the_likeliest_stays() -> None:
    logprobs = completion_logprobs(event(1, TopLogprob(2, -0.1), TopLogprob(1, -2.0)), half_characters, 0)
    assert logprobs.top_logprobs == [{"\ufffd": -0.1}]
    assert logprobs.token_logprobs == [-2.0]


def test_an_impossible_alternative_is_a_number_that_json_has() -> None:
    top = TopLogprob(3, float("-inf"))
    assert chat_logprobs(event(3, top), half_characters).content[0].top_logprobs[0].logprob == -9999.0
