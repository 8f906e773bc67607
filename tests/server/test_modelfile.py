import pytest

from parallm.errors import InvalidRequest
from parallm.registry.records import Overlay
from parallm.server.ollama.modelfile import read_modelfile, write_modelfile

MODELFILE = '''
# a poet
FROM qwen3:8b
parameter temperature 0.7
PARAMETER stop "<|end|>"
PARAMETER stop AI:
PARAMETER num_ctx 4096
PARAMETER use_mmap true
SYSTEM """You are a poet.
Answer in "verse"."""
MESSAGE user Is Toronto in Canada?
MESSAGE assistant "yes"
LICENSE MIT
'''


def test_a_modelfile_is_read() -> None:
    assert read_modelfile(MODELFILE) == {
        "from": "qwen3:8b",
        "parameters": {"temperature": 0.7, "stop": ["<|end|>", "AI:"], "num_ctx": 4096, "use_mmap": True},
        "system": 'You are a poet.\nAnswer in "verse".',
        "messages": [{"role": "user", "content": "Is Toronto in Canada?"}, {"role": "assistant", "content": "yes"}],
        "license": "MIT",
    }


@pytest.mark.parametrize("text", ["plain", 'with "quotes" inside', "two\nlines", '"""', 'ends with "', "# no comment"])
def test_what_is_written_is_read_again(text: str) -> None:
    messages = ({"role": "user", "content": text},)
    overlay = Overlay(system=text, parameters={"stop": ["a", text], "seed": 7}, messages=messages, license=text)
    assert read_modelfile(write_modelfile("poet:latest", "qwen3:8b", overlay)) == {
        "from": "qwen3:8b",
        "system": text,
        "parameters": {"stop": ["a", text], "seed": 7},
        "messages": [dict(message) for message in messages],
        "license": text,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SYSTEM x", "no FROM line"),
        ("FROM", "line 1 of the Modelfile is no command with a value"),
        ("FROM a\nFORM b", "line 2 of the Modelfile: no command 'FORM'"),
        ("FROM a\nPARAMETER heat 1", "no parameter 'heat'"),
        ("FROM a\nPARAMETER seed x", "seed is 'x'"),
        ("FROM a\nMESSAGE tool x", "MESSAGE takes system, user, assistant"),
        ('FROM a\nSYSTEM """x', 'the text after """ does not end'),
        ("FROM a\nRENDERER x", "RENDERER is not supported"),
    ],
)
def test_what_is_no_modelfile_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_modelfile(text)
