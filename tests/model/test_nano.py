import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

import parallm.model
from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings

NANO = Path(parallm.model.__file__).parent / "nano"
QUESTION = "Tom has 12 apples and buys 3 bags of 4. How many apples does Tom have now?"


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    model, tokenizer = load(str(NANO))[:2]
    return model, tokenizer


def test_the_folder_is_complete_and_holds_at_most_eight_megabytes() -> None:
    names = {path.name for path in NANO.iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names == expected | {"README.md"}
    assert sum(path.stat().st_size for path in NANO.iterdir()) <= 8_000_000


def test_the_readme_names_the_weights_that_stand_beside_it() -> None:
    digest = hashlib.sha256((NANO / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (NANO / "README.md").read_text()


def test_mlx_lm_loads_it_in_float32_with_the_width_of_its_vocabulary(nano: tuple[Any, Any]) -> None:
    model, tokenizer = nano
    config = json.loads((NANO / "config.json").read_text())
    logits = model(mx.array([tokenizer.encode(QUESTION)]))
    assert logits.dtype == mx.float32
    assert logits.shape[-1] == config["vocab_size"] == len(tokenizer.get_vocab())
    assert config["max_position_embeddings"] >= 512
    assert bool(mx.isfinite(logits).all())


@pytest.mark.parametrize(
    "text",
    [
        QUESTION,
        "3 * 4 = 12\n12 + 12 = 24\n#### 24",
        "",
        " ",
        "  two  spaces\tand\r\nlines \n\n",
        "Größe, naïve café, 東京, العربية, עברית",
        "🙂👩‍👩‍👧 \U0001f600 \u0000 \u200b \ufeff",
        "def f(x):\n    return x ** 2  # 1e-5",
        "e\u0301 is not \u00e9",
        "appleses Tommy 007 ####12 #### 12",
        "".join(map(chr, range(1, 0x250))),
    ],
)
def test_any_text_survives_the_tokenizer(nano: tuple[Any, Any], text: str) -> None:
    tokenizer = nano[1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_and_each_word_of_the_stories_is_one_token(nano: tuple[Any, Any]) -> None:
    tokenizer = nano[1]
    assert len(tokenizer.encode("2026")) == 4
    assert len(tokenizer.encode("Tom has 12 apples")) == 6
    assert len(tokenizer.encode("12 + 12 = 24\n#### 24")) == 12


def test_the_chat_template_marks_turns_and_opens_the_answer(nano: tuple[Any, Any]) -> None:
    tokenizer = nano[1]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": QUESTION},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    begin = "<|system|>Be brief.<|user|>Hello<|assistant|>Hi<|end|>"
    assert text == f"{begin}<|user|>{QUESTION}<|assistant|>"
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_token_id]


def test_prompts_and_answers_of_the_environment_are_short(nano: tuple[Any, Any]) -> None:
    tokenizer = nano[1]
    for problem in Arithmetic(ArithmeticSettings()).problems("test"):
        assert len(tokenizer.encode(problem.messages[0].content)) <= 50


def test_a_few_held_out_problems_are_solved_before_training_and_most_are_not(nano: tuple[Any, Any]) -> None:
    model, tokenizer = nano
    environment = Arithmetic(ArithmeticSettings())
    solved = 0
    for problem in environment.problems("test")[:40]:
        turns = [{"role": "user", "content": problem.messages[0].content}]
        tokens = list(tokenizer.apply_chat_template(turns, add_generation_prompt=True))
        cache = make_prompt_cache(model)
        written: list[int] = []
        pending = tokens
        while len(written) < 48 and pending != [tokenizer.eos_token_id]:
            pending = [int(mx.argmax(model(mx.array([pending]), cache=cache)[0, -1]).item())]
            written += pending
        solved += int(environment.score(problem, tokenizer.decode(written[:-1]))["correct"])
    assert 40 * 0.15 <= solved <= 40 * 0.55
