"""What `scripts/check_verifiers.py` prepares and leaves out. Needs no verifiers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
from tokenizers import Tokenizer

from parallm.model.load import NANO

SCRIPTS = Path(__file__).parent.parent / "scripts"
TABLE = "model.embed_tokens.weight"
TEXTS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from verifiers_beginner import digits, shown
print(json.dumps({"texts": digits(50, 0), "rows": [shown("123", place) for place in range(3)]}))
"""


def output(*command: str) -> str:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def test_demonstrations_show_the_form_and_the_reversal_once_in_three() -> None:
    found = json.loads(output("-c", TEXTS, str(SCRIPTS)))
    assert [row["completion"] for row in found["rows"]] == [
        "<reversed_text>321</reversed_text>",
        "<reversed_text>123</reversed_text>",
        "<reversed_text>123</reversed_text>",
    ]
    assert len(set(found["texts"])) == 50
    assert all(text != text[::-1] for text in found["texts"])


def test_without_a_model_reverse_text_is_not_run_and_no_figure_says_otherwise() -> None:
    lines = output(str(SCRIPTS / "check_verifiers.py"), "--only=reverse-text").splitlines()
    assert lines[-2].split(maxsplit=2)[2] == "not run: needs --model and --environments"
    assert json.loads(lines[-1])["figures"] == {"verifiers.faults": 0.0}


def test_a_token_without_an_embedding_of_its_own_gets_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    seven, underscore, hash_mark = (tokenizer.encode(one).ids[0] for one in "7_#")
    arrays = mx.load(str(NANO / "model.safetensors"))
    arrays[TABLE][underscore] = 2 * arrays[TABLE][hash_mark]  # one direction, as of tokens that no training has met
    (tmp_path / "model").mkdir()
    shutil.copy(NANO / "tokenizer.json", tmp_path / "model")
    mx.save_safetensors(str(tmp_path / "model" / "model.safetensors"), arrays)
    output(str(SCRIPTS / "workers" / "tell_apart.py"), str(tmp_path / "model"), str(tmp_path / "copy"), "7_")
    copy = mx.load(str(tmp_path / "copy" / "model.safetensors"))
    is_changed = (arrays[TABLE] != copy[TABLE]).any(axis=1).tolist()
    assert seven != underscore
    assert [row for row, changed in enumerate(is_changed) if changed] == [underscore]
    assert all(mx.array_equal(arrays[name], copy[name]) for name in arrays if name != TABLE)
