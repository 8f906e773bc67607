"""The adapter that a run begins with: a given one has a form, and keys that ask for another one are refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from parallm.errors import AdapterError
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import write_peft
from parallm.model.adapters.initial import starting_adapter
from parallm.model.load import load_shared_model
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

FORM = {"rank": 4, "alpha": 8.0, "rslora": True, "ranks": {"q_proj": 2}, "targets": ("q_proj", "v_proj")}


@pytest.fixture
def begin(tiny_model: Callable[[str], Path], tmp_path: Path) -> Callable[..., Adapter]:
    """The adapter of a run with the given keys of model.lora, from one of four layers of fourteen."""
    path = str(tiny_model("llama"))

    def load(lora: LoraSettings) -> tuple[SharedModel, ModelSettings]:
        settings = ModelSettings(path=path, adapter=str(tmp_path), lora=lora)
        return load_shared_model(settings), settings

    model, _ = load(LoraSettings(targets=("q_proj", "v_proj")))
    lora = LoraSettings(**FORM, dropout=0.1)  # type: ignore[arg-type]  # by name
    write_peft(
        starting_adapter(ModelSettings(path=path, lora=lora), model, seed=0), tmp_path, "llama", model_type="llama"
    )

    def make(*, is_trained: bool = True, **keys: object) -> Adapter:
        model, settings = load(LoraSettings(**keys))  # type: ignore[arg-type]  # by name
        return starting_adapter(settings, model, seed=0, is_trained=is_trained)

    return make


@pytest.mark.parametrize(
    ("key", "value", "way_out"),
    [
        ("rank", 8, r"has rank 4, the run 8; set model\.lora\.rank=4, or leave model\.lora\.rank out"),
        ("alpha", 64.0, r"has alpha 8\.0, the run 64\.0; set model\.lora\.alpha=8\.0, or leave model\.lora\.alpha out"),
        ("alpha", 32.0, r"has alpha 8\.0, the run 32\.0"),  # also what a new adapter would have
        ("dora", True, r"has dora False, the run True; set model\.lora\.dora=false"),
        ("rslora", False, r"has rslora True, the run False; set model\.lora\.rslora=true"),
        (
            "ranks",
            {"v_proj": 2},
            r"has other ranks than model\.lora\.ranks; set 'model\.lora\.ranks=\{.*q_proj: 2\}', or",
        ),
        ("targets", "all-linear", r"adapts 4 layers, model\.lora\.targets and model\.lora\.layers choose 14, such as"),
        ("layers", "all", r"adapts 4 layers, .* choose 14, such as model\.layers\.0\.mlp\.down_proj; leave both out"),
        ("targets", ("q_proj",), r"v_proj is no LoRA target here; there are 2"),
    ],
)
def test_a_key_that_asks_for_another_form_is_refused(
    key: str, value: object, way_out: str, begin: Callable[..., Adapter]
) -> None:
    with pytest.raises(AdapterError, match=way_out):
        begin(**{key: value})


def test_every_contradiction_is_named_at_once(begin: Callable[..., Adapter]) -> None:
    with pytest.raises(AdapterError) as refused:
        begin(rank=8, alpha=1.0, dora=True)
    assert [line.partition(" has ")[2].split()[0] for line in str(refused.value).splitlines()] == [
        "rank", "alpha", "dora",
    ]  # fmt: skip


@pytest.mark.parametrize("keys", [{}, FORM, {"rank": 4, "alpha": 8.0}], ids=str)
def test_what_is_not_asked_for_is_as_the_adapter_has_it(keys: dict[str, object], begin: Callable[..., Adapter]) -> None:
    adapter = begin(**keys)
    assert (adapter.rank, adapter.alpha, adapter.rslora, adapter.dropout) == (4, 8.0, True, 0.1)
    assert {target.rpartition(".")[2] for target in adapter.targets} == {"q_proj", "v_proj"}
    assert set(adapter.ranks.values()) == {2}
    assert adapter.version == 1


def test_dropout_is_of_the_training_and_not_of_the_form(begin: Callable[..., Adapter]) -> None:
    assert begin(dropout=0.3).dropout == 0.3
    assert begin(dropout=0.0).dropout == 0.0


def test_a_server_may_have_more_layers_than_its_first_adapter(begin: Callable[..., Adapter]) -> None:
    assert len(begin(targets="all-linear", is_trained=False).targets) == 4
