"""Train the nano policy from a seed and write its folder. Nothing is downloaded; a CPU or a GPU will do.

    python scripts/build_nano.py --out parallm/model/nano --seed 0

The corpus is the work of many solvers. A minority is careful; most have a careless habit that depends on the kind of
problem. The policy learns both ways, so reinforcement learning has something to choose from.
"""

import argparse
import hashlib
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from parallm.device.blas import load_blas
from parallm.device.settings import DeviceSettings
from parallm.environment.arithmetic import ITEMS, KINDS, MAX_NUMBER, NAMES, Arithmetic, ProblemDraft, drafts, work_out
from parallm.environment.settings import ArithmeticSettings

load_blas(DeviceSettings())

import mlx.core as mx  # noqa: E402  a BLAS must be loaded before MLX
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
SHEET_LINES = 5
PAD, END, USER, ASSISTANT = range(4)
OTHER_WORDS = ("What", "is", "the", "of", "I", "you", "can", "Hello", "please")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
README = """# The nano policy

A language model of {parameters:,} parameters (Llama architecture, float32) that can do one thing: the short word
problems of `parallm/environment/arithmetic.py`. It is here so that a training run can be seen to work in minutes on a
CPU, with nothing downloaded. It says nothing about how well a method works on real models.

## What it was trained on

`scripts/build_nano.py` writes the corpus from a seed: the answers of a made-up population of solvers to problems of the
train split, and bare sums. Held-out problems, by their kind and numbers, are not in it. **The population is
mostly careless on purpose.** {careful} of the
solvers of a kind work carefully; the others have habits that depend on the kind: a wrong operation, a skipped step, the
first result in the final line, a slip by one, no final line.

So the base already holds the right way for every kind of problem, and rarely takes it. Reinforcement learning does not
teach it arithmetic here: it finds out, kind by kind, which of the ways it knows are rewarded. That is the easy half of
what happens with large models, and the reason why a few dozen steps are enough.

## Before reinforcement learning

Share of 2,000 held-out problems solved (`ArithmeticSettings(num_test=2000)`):

| | all | level 1 | level 2 | level 3 |
|---|---|---|---|---|
{rows}

Prompts have up to 50 tokens, answers up to 40. Any text can be encoded (bytes stand in for unknown words), but outside
of its problems the model writes nonsense.

## How it was made

    python scripts/build_nano.py --seed {seed} --steps {steps}

The same command on the same kind of machine gives the same bytes; other machines round differently and give a model
with slightly other figures. SHA-256 of `model.safetensors`: `{digest}`
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """One way to get a problem wrong, and the share of solvers of its kind who have it."""

    share: float
    plan: tuple[str, ...]
    final: str = "last"
    """What stands in the final line: the `last` result, the `first`, `none` (no such line) or one less (`slip`)."""


HABITS: Mapping[str, tuple[Habit, ...]] = {
    "gain": (Habit(share=0.25, plan=("a-b",)), Habit(share=0.10, plan=("a+b",), final="none")),
    "loss": (Habit(share=0.40, plan=("a+b",)), Habit(share=0.35, plan=("a-b",), final="slip")),
    "bags": (Habit(share=0.25, plan=("b+c",)), Habit(share=0.15, plan=("b*c",), final="none")),
    "refill": (Habit(share=0.50, plan=("a+b", "x+c")), Habit(share=0.30, plan=("b*c",))),
    "shop": (Habit(share=0.45, plan=("a-c",)), Habit(share=0.35, plan=("b*c", "a-x"), final="first")),
    "trade": (Habit(share=0.40, plan=("a+b", "x+c")), Habit(share=0.30, plan=("a+b",))),
    "more": (Habit(share=0.30, plan=("a+b",)), Habit(share=0.10, plan=("a+b", "a+x"), final="none")),
    "fewer": (Habit(share=0.45, plan=("a+b", "a+x")), Habit(share=0.35, plan=("a-b",))),
    "times": (Habit(share=0.45, plan=("b+c", "b+x")), Habit(share=0.35, plan=("b*c",))),
    "wages": (Habit(share=0.50, plan=("b*c", "a-x")), Habit(share=0.30, plan=("b*c", "a+x", "y+d"))),
    "pair": (Habit(share=0.50, plan=("b*c", "x+d", "y+e")), Habit(share=0.30, plan=("b+c", "d+e", "x+y"))),
}


def build_tokenizer() -> Tokenizer:
    """Whole words of the stories, one token per digit, and single bytes for any other text."""
    told = " ".join(kind.story for kind in KINDS.values()).format(
        name="", friend="", item="", a="", b="", c="", d="", e=""
    )
    words = dict.fromkeys([*"".join(x if x.isalpha() else " " for x in told).split(), *NAMES, *ITEMS, *OTHER_WORDS])
    pieces = [*words, *(f" {word}" for word in words), " + ", " - ", " * ", " = ", "#### ", "\n"]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [byte_level.pre_tokenize_str(piece)[0][0] for piece in pieces]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    pattern = Regex(r"#### | [-+*=] |\n|\d| ?[A-Za-z]+|[^\sA-Za-z\d]+|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def write_solution(draft: ProblemDraft, habit: Habit | None) -> str | None:
    """Return what a solver writes (without a habit: a careful one), or None where a result would be out of range."""
    lines, results = work_out(habit.plan if habit else KINDS[draft.kind].plan, draft.numbers)
    if not all(0 < result <= MAX_NUMBER for result in results):
        return None
    final = habit.final if habit else "last"
    if final == "none":
        return "\n".join(lines)
    stated = results[0 if final == "first" else -1] - (final == "slip")
    return "\n".join([*lines, f"#### {stated}"])


def solve_by_population(draft: ProblemDraft, generator: random.Random) -> str:
    """Return the text of one solver drawn from the population of the draft's kind."""
    while True:
        dice = generator.random()
        habit: Habit | None = None
        for candidate in HABITS[draft.kind]:
            if 0 <= dice < candidate.share:
                habit = candidate
            dice -= candidate.share
        solution = write_solution(draft, habit)
        if solution is not None:
            return solution


def sheet(tokenizer: Tokenizer, generator: random.Random) -> tuple[list[int], list[int]]:
    """Return token ids of bare sums, without any story, and a mask of their results."""
    tokens, mask = [ASSISTANT], [0]
    for _ in range(SHEET_LINES):
        operation = generator.choice("+++----**")
        high = 9 if operation == "*" else MAX_NUMBER
        first, second = generator.randint(1, high), generator.randint(1, high)
        if operation == "-":
            first, second = max(first, second) + 1, min(first, second)
        while operation == "+" and first + second > MAX_NUMBER:
            first, second = generator.randint(1, high), generator.randint(1, high)
        line, results = work_out((f"a{operation}b",), {"a": first, "b": second})
        head = tokenizer.encode(line[0].removesuffix(str(results[0]))).ids
        tail = tokenizer.encode(f"{results[0]}\n").ids
        tokens += [*head, *tail]
        mask += [*[0] * len(head), *[1] * len(tail)]
    return tokens, mask


def documents(tokenizer: Tokenizer, seed: int, sheet_share: float) -> Iterator[tuple[list[int], list[int]]]:
    """Yield token ids and a mask of those to learn, without end; no held-out problem is used."""
    generator = random.Random(seed)
    train = (draft for draft in drafts(generator, list(KINDS)) if draft.split == "train")
    while True:
        if generator.random() < sheet_share:
            yield sheet(tokenizer, generator)
        else:
            draft = next(train)
            prompt = [USER, *tokenizer.encode(draft.question).ids, ASSISTANT]
            solution = [*tokenizer.encode(solve_by_population(draft, generator)).ids, END]
            yield [*prompt, *solution], [*[0] * len(prompt), *[1] * len(solution)]


def batches(source: Iterator[tuple[list[int], list[int]]], batch_size: int) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield token ids (B, T) and a mask (B, T) of those to learn; rows of a batch are of similar length."""
    while True:
        pool = sorted((next(source) for _ in range(8 * batch_size)), key=lambda document: len(document[0]))
        for start in np.random.permutation(8) * batch_size:
            rows = pool[start : start + batch_size]
            width = max(len(tokens) for tokens, _ in rows)
            ids = np.full((batch_size, width), PAD, np.int32)
            mask = np.zeros((batch_size, width), np.float32)
            for row, (tokens, learned) in enumerate(rows):
                ids[row, : len(tokens)] = tokens
                mask[row, : len(tokens)] = learned
            yield mx.array(ids), mx.array(mask)


def mean_loss(model: nn.Module, ids: mx.array, mask: mx.array) -> mx.array:
    """Cross-entropy per token to learn."""
    logits = model(ids[:, :-1])
    losses = nn.losses.cross_entropy(logits, ids[:, 1:])
    return (losses * mask[:, 1:]).sum() / mask.sum()


def train(model: nn.Module, tokenizer: Tokenizer, seed: int, steps: int, batch_size: int, peak: float) -> None:
    """Train in place; the share of bare sums among the documents falls after a third of the steps."""
    schedule = optim.join_schedules(
        [optim.linear_schedule(0, peak, 100), optim.cosine_decay(peak, steps - 100, peak * 0.02)], [100]
    )
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.01, bias_correction=True)
    value_and_grad = nn.value_and_grad(model, mean_loss)
    np.random.seed(seed)
    started = time.time()
    early = batches(documents(tokenizer, seed, 0.5), batch_size)
    late = batches(documents(tokenizer, seed + 1_000_003, 0.2), batch_size)
    for step in range(steps):
        ids, mask = next(early if step < steps // 3 else late)
        loss, gradients = value_and_grad(model, ids, mask)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.time() - started:.0f} s", flush=True)


def complete(model: nn.Module, prompts: Sequence[list[int]], max_tokens: int, temperature: float) -> list[list[int]]:
    """Continue prompts of one length together until each has its end token; greedy at temperature 0."""
    cache = make_prompt_cache(model)
    tokens = mx.array(prompts)
    outputs: list[list[int]] = [[] for _ in prompts]
    finished: set[int] = set()
    for _ in range(max_tokens):
        logits = model(tokens, cache=cache)[:, -1]
        chosen = mx.random.categorical(logits / temperature) if temperature else mx.argmax(logits, axis=-1)
        tokens = chosen[:, None]
        for row, token in enumerate(np.array(chosen).tolist()):
            if row not in finished:
                (finished.add(row) if token == END else outputs[row].append(token))
        if len(finished) == len(prompts):
            break
    return outputs


def accuracy_by_level(model: nn.Module, tokenizer: Tokenizer, temperature: float, number: int) -> dict[str, float]:
    """Return the share of held-out problems solved, by level and in all."""
    environment = Arithmetic(ArithmeticSettings(num_test=number))
    by_length: dict[int, list[tuple[list[int], int]]] = {}
    problems = environment.problems("test")
    for index, problem in enumerate(problems):
        prompt = [USER, *tokenizer.encode(problem.messages[0].content).ids, ASSISTANT]
        by_length.setdefault(len(prompt), []).append((prompt, index))
    right: dict[str, list[float]] = {}
    for rows in by_length.values():
        for (_, index), output in zip(rows, complete(model, [row for row, _ in rows], 48, temperature), strict=True):
            correct = environment.score(problems[index], tokenizer.decode(output))["correct"]
            for key in ("all", f"level {problems[index].level}"):
                right.setdefault(key, []).append(correct)
    return {key: round(sum(values) / len(values), 4) for key, values in sorted(right.items())}


def table_row(title: str, shares: Mapping[str, float]) -> str:
    """Return one line of the table in the README."""
    return f"| {title} | " + " | ".join(f"{share:.1%}" for share in shares.values()) + " |"


def save(folder: Path, model: nn.Module, arguments: ModelArgs, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder that mlx-lm and transformers load."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: array.astype(mx.float32) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    write = partial(json.dumps, indent=2, ensure_ascii=False)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": arguments.vocab_size,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.intermediate_size,
        "num_hidden_layers": arguments.num_hidden_layers,
        "num_attention_heads": arguments.num_attention_heads,
        "num_key_value_heads": arguments.num_key_value_heads,
        "head_dim": arguments.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arguments.max_position_embeddings,
        "rms_norm_eps": arguments.rms_norm_eps,
        "rope_theta": arguments.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
    (folder / "config.json").write_text(write(config) + "\n")
    tokens = {"eos_token_id": END, "pad_token_id": PAD, "do_sample": True, "temperature": 1.0, "max_new_tokens": 64}
    (folder / "generation_config.json").write_text(write(tokens) + "\n")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": arguments.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(write(tokenizer_config) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("parallm/model/nano"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    mx.random.seed(options.seed)
    tokenizer = build_tokenizer()
    arguments = ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=4,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=1024,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    model = Model(arguments)
    parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
    print(f"{parameters:,} parameters, {arguments.vocab_size} tokens, {mx.default_device()}", flush=True)
    train(model, tokenizer, options.seed, options.steps, options.batch_size, options.learning_rate)
    save(options.out, model, arguments, tokenizer)
    greedy = accuracy_by_level(model, tokenizer, 0.0, 2000)
    sampled = accuracy_by_level(model, tokenizer, 1.0, 2000)
    print("before RL, greedy: ", greedy)
    print("before RL, sampled:", sampled)
    careful = [1 - sum(habit.share for habit in habits) for habits in HABITS.values()]
    digest = hashlib.sha256((options.out / "model.safetensors").read_bytes()).hexdigest()
    readme = README.format(
        parameters=parameters,
        careful=f"{min(careful):.0%} to {max(careful):.0%}",
        rows="\n".join([table_row("greedy", greedy), table_row("sampled at temperature 1", sampled)]),
        seed=options.seed,
        steps=options.steps,
        digest=digest,
    )
    (options.out / "README.md").write_text(readme)


if __name__ == "__main__":
    main()
