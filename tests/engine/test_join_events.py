from parallm.engine.async_engine import joined
from parallm.types import Completion, TokenEvent, TopLogprob


def event(name: str, index: int, token: int, completion: Completion | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=name,
        index=index,
        tokens=(token,),
        logprobs=(-float(token),),
        top_logprobs=((TopLogprob(token, -1.0),),),
        text=f"<{token}>",
        completion=completion,
    )


def test_what_piles_up_of_one_completion_becomes_one_event() -> None:
    end = Completion(
        request_id="a",
        index=0,
        tokens=(1, 2),
        logprobs=(-1.0, -2.0),
        top_logprobs=((), ()),
        text="<1><2>",
        finish_reason="stop",
        weight_versions=(),
    )
    first, other, last = event("a", 0, 1), event("a", 1, 7), event("a", 0, 2, end)
    one, two = joined([first, other, last])
    assert (one.tokens, one.logprobs, one.text, one.completion) == ((1, 2), (-1.0, -2.0), "<1><2>", end)
    assert one.top_logprobs == ((TopLogprob(1, -1.0),), (TopLogprob(2, -1.0),))
    assert two is other


def test_completions_of_two_requests_stay_apart() -> None:
    assert joined([event("a", 0, 1), event("b", 0, 2)]) == [event("a", 0, 1), event("b", 0, 2)]
