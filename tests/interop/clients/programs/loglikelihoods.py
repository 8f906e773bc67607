"""Log-likelihoods of continuations by mlx-lm alone: the whole text at once through the model, no engine, no server.

python loglikelihoods.py FOLDER '[["12 + 3 =", " 15"]]'
"""

import json
import sys

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import load


def main(folder: str, pairs: list[tuple[str, str]]) -> None:
    model, tokenizer = load(folder)
    found = []
    for context, continuation in pairs:
        # as lm-eval asks for it: a token that would reach over the border is cut there
        before = tokenizer.encode(context)
        start = len(before)
        tokens_T = mx.array(before + tokenizer.encode(context + continuation)[start:])
        logprobs_TV = nn.log_softmax(model(tokens_T[None])[0].astype(mx.float32), axis=-1)
        # the logits at one place are about the token at the next
        rows_CV, targets_C = logprobs_TV[start - 1 : -1], tokens_T[start:]
        own_C = mx.take_along_axis(rows_CV, targets_C[:, None], axis=-1)[:, 0]
        is_greedy = bool(mx.all(mx.argmax(rows_CV, axis=-1) == targets_C))
        found.append({"loglikelihood": mx.sum(own_C).item(), "is_greedy": is_greedy})
    print(json.dumps({"found": found}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
