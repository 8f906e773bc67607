"""Text of one completion as its tokens come: stop strings, streamed pieces, ends."""

from collections.abc import Callable, Sequence

import pytest

from parallm.engine.engine import LONG_STEPS, Outbox
from parallm.engine.sequence import Sequence as EngineSequence
from parallm.engine.sequence import make_sequences
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.model.shared_model import SharedModel
from parallm.types import Completion, GenerationRequest, SamplingParams, TokenEvent

END = 1


@pytest.fixture
def tokenizer(load_tiny: Callable[..., SharedModel]) -> ChatTokenizer:
    return load_tiny("llama").tokenizer


def play(
    tokenizer: ChatTokenizer,
    tokens: Sequence[int],
    *,
    stop: tuple[str, ...] = (),
    is_streaming: bool = True,
    max_tokens: int = 100,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> tuple[list[str], Completion | None]:
    """Feed `tokens` until the sequence ends; the streamed pieces of text and the completion."""
    sampling = SamplingParams(max_tokens=max_tokens, stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    request = GenerationRequest(request_id="r", prompt_tokens=(5, 6), sampling=sampling)
    sequence = EngineSequence(
        request=request, index=0, seed=0, adapter=None, is_streaming=is_streaming, max_tokens=max_tokens
    )
    pieces: list[str] = []
    given: tuple[int, ...] = ()
    for token in tokens:
        sequence.append(token, -0.5, (), tokenizer)
        if sequence.has_event:
            event = sequence.event(tokenizer)
            pieces.append(event.text)
            given += event.tokens
            if event.completion is not None:
                assert given == event.completion.tokens
                return pieces, event.completion
    return pieces, None


@pytest.mark.parametrize("is_streaming", [True, False])
@pytest.mark.parametrize("stop", ["4\n#", "= 24", "#### 2", "\n", "12 + "])
def test_text_ends_before_a_stop_string_that_spans_tokens(
    tokenizer: ChatTokenizer, stop: str, is_streaming: bool
) -> None:
    text = "12 + 12 = 24\n#### 24"
    pieces, completion = play(tokenizer, tokenizer.encode(text), stop=(stop,), is_streaming=is_streaming)
    assert completion is not None
    assert completion.finish_reason == "stop"
    assert completion.text == "".join(pieces) == text[: text.index(stop)]
    assert len(completion.tokens) == len(completion.logprobs) <= len(tokenizer.encode(text))


def test_what_may_become_a_stop_string_is_held_back(tokenizer: ChatTokenizer) -> None:
    pieces, _ = play(tokenizer, tokenizer.encode("1###1"), stop=("####",))
    tokens = [tokenizer.token_text(token) for token in tokenizer.encode("1###1")]
    shown = ["".join(pieces[: index + 1]) for index in range(len(pieces))]
    assert shown[0] == "1"
    assert all(not text.endswith("#") for text in shown)
    assert shown[-1] == "1###1" == "".join(tokens)


def test_the_earliest_of_several_stop_strings_wins(tokenizer: ChatTokenizer) -> None:
    _, completion = play(tokenizer, tokenizer.encode("12 + 30 = 42"), stop=("= 4", "+ 30 = 42", "zzz"))
    assert completion is not None
    assert completion.text == "12 + 30 "


def test_the_end_token_stays_in_the_tokens_and_out_of_the_text(tokenizer: ChatTokenizer) -> None:
    tokens = [*tokenizer.encode("2 + 2"), END, 7]
    _, completion = play(tokenizer, tokens)
    assert completion is not None
    assert (completion.tokens, completion.text, completion.finish_reason) == (tuple(tokens[:-1]), "2 + 2", "stop")


def test_an_ignored_end_token_goes_on(tokenizer: ChatTokenizer) -> None:
    tokens = [*tokenizer.encode("2"), END, *tokenizer.encode("2")]
    pieces, completion = play(tokenizer, tokens, ignore_eos=True, max_tokens=3)
    assert completion is not None
    assert (completion.tokens, completion.finish_reason) == (tuple(tokens), "length")
    assert completion.text == "".join(pieces) == "22"


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_stop_token_ends_without_its_text(tokenizer: ChatTokenizer, is_streaming: bool) -> None:
    tokens = tokenizer.encode("2 + 3")
    _, completion = play(tokenizer, tokens, stop_token_ids=(tokens[-1],), is_streaming=is_streaming)
    assert completion is not None
    assert (completion.text.rstrip(), completion.finish_reason, completion.tokens) == ("2 +", "stop", tokens)


@pytest.mark.parametrize("text", ["naïve café 東京 🙂👩‍👩‍👧 end", "Größe\n\n  two  spaces"])
def test_streamed_pieces_are_whole_characters_and_add_up(tokenizer: ChatTokenizer, text: str) -> None:
    pieces, completion = play(tokenizer, [*tokenizer.encode(text), END])
    assert completion is not None
    assert "".join(pieces) == completion.text == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_that_stays_incomplete_is_shown_at_the_end(tokenizer: ChatTokenizer) -> None:
    tokens = tokenizer.encode("a🙂")[:-1]
    pieces, completion = play(tokenizer, tokens, max_tokens=len(tokens))
    assert completion is not None
    assert completion.text == "".join(pieces)
    assert completion.text[0] == "a"
    assert "\ufffd" in completion.text[1:]


def test_held_events_of_several_steps_are_emitted_before_other_work(tokenizer: ChatTokenizer) -> None:
    request = GenerationRequest(request_id="r", prompt_tokens=(5, 6), sampling=SamplingParams(max_tokens=100))
    (sequence,) = make_sequences(request, None, is_streaming=True, arrival=1, max_context=200)
    emitted: list[TokenEvent] = []
    outbox = Outbox(tokenizer, emitted.extend)
    outbox.is_holding = True
    for _ in range(LONG_STEPS):
        sequence.append(7, -0.5, (), tokenizer)
        outbox.put([sequence])
        outbox.put([])  # a step of a class whose completions do not stream
        outbox.flush_before_other_work()
    assert [len(event.tokens) for event in emitted] == [1]
    sequence.append(7, -0.5, (), tokenizer)
    outbox.put([sequence])
    outbox.flush_before_other_work()
    assert [len(event.tokens) for event in emitted] == [1, LONG_STEPS]


def test_a_sequence_that_does_not_stream_makes_one_event(tokenizer: ChatTokenizer) -> None:
    pieces, completion = play(tokenizer, tokenizer.encode("2 + 2"), is_streaming=False, max_tokens=3)
    assert len(pieces) == 1
    assert completion is not None
    assert completion.finish_reason == "length"


def test_a_sequence_ends_where_the_context_ends() -> None:
    request = GenerationRequest(request_id="r", prompt_tokens=(5, 6), sampling=SamplingParams(max_tokens=100))
    (sequence,) = make_sequences(request, None, is_streaming=False, arrival=1, max_context=8)
    assert sequence.max_tokens == 6
