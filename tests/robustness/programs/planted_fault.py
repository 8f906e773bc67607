"""`python -m parallm.train` with a fault in one route: an odd text at /tokenize is an error that nobody handles."""

import parallm.train as train
from parallm.server.dialects import routes_tokenize

checked = routes_tokenize.check_text


def fail(text: str, *rest: object) -> None:
    if not text.isprintable() or len(text) > 1000:
        raise ZeroDivisionError("planted")
    checked(text, *rest)


routes_tokenize.check_text = fail
train.main()
