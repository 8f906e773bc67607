"""A tokenizer's files, changed so that it ends texts with a token: other programs then read what was trained."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import Sequence, TemplateProcessing

from parallm.errors import ModelError

PROBE = "a"


def end_texts_with(folder: Path, token: int) -> None:
    """Let the tokenizer.json in `folder` end each text with the token of this id, after what it adds already.

    Raises ModelError where there is none, and for a tokenizer that cannot be changed so.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"its vectors are those of texts that end with the token {token}, which the tokenizer does not add, and "
            "the base has no tokenizer.json that could; export with formats=[mlx]"
        )
    tokenizer = Tokenizer.from_file(str(file))
    name, expected = tokenizer.id_to_token(token), [*tokenizer.encode(PROBE).ids, token]
    end = TemplateProcessing(single=["$A", name], pair=["$A", "$B:1", name], special_tokens=[(name, token)])
    own = tokenizer.post_processor
    tokenizer.post_processor = end if own is None else Sequence([own, end])
    tokenizer.save(str(file))
    found = Tokenizer.from_file(str(file)).encode(PROBE).ids
    if found != expected:
        raise ModelError(f"its tokenizer would read {PROBE!r} as {found}, not as {expected}; export with formats=[mlx]")
