"""LoRA on experts: each row gets the product of its own version's matrices of the experts that its token chose."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load as load_with_mlx_lm

from parallm.learner.passes.recomputation import activation_bytes, checkpointed
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.files import read_adapter, write_mlx
from parallm.model.adapters.fuse import fuse
from parallm.model.load import load_base, load_shared_model
from parallm.model.lora.concatenated import concatenate_loras
from parallm.model.lora.dora import lora_scaling
from parallm.model.lora.experts import ExpertLora, Routing, expert_lora, expert_rank, stack_experts
from parallm.model.lora.linear import LoraBinding
from parallm.model.lora.segmented import PackedLayout, PackedLora, SegmentedLora, order_rows
from parallm.model.lora.selector import LoraSelector, training_lora
from parallm.model.lora.single import SingleLora, single_lora
from parallm.model.patches.experts import sort_by_expert
from parallm.model.settings import LoraSettings, ModelSettings
from parallm.model.shared_model import SharedModel

EVERYTHING = ("all-linear", "experts")
NUM_EXPERTS, INPUTS, OUTPUTS, RANK = 4, 16, 24, expert_rank(3)
LONG = mx.arange(48)[None] * 7 % 380  # more than the 64 rows from which on mlx-lm sorts
SHORT = mx.array([[5, 9, 17, 33, 65]])


def weights(seed: int, rank: int = RANK) -> ExpertLora:
    key_a, key_b = mx.random.split(mx.random.key(seed))
    return expert_lora(
        {"layer": mx.random.normal((NUM_EXPERTS, INPUTS, rank), key=key_a)},
        {"layer": mx.random.normal((NUM_EXPERTS, rank, OUTPUTS), key=key_b)},
        (),
    )


def rows(num_tokens: int, chosen: int = 2) -> tuple[mx.array, mx.array]:
    """Inputs (2, T, I) of two rows, and experts (2, T, chosen), the same one twice for no token."""
    generator = np.random.default_rng(num_tokens)
    experts = generator.permuted(np.tile(np.arange(NUM_EXPERTS), (2, num_tokens, 1)), axis=-1)[..., :chosen]
    return mx.random.normal((2, num_tokens, INPUTS), key=mx.random.key(1)), mx.array(experts.astype(np.uint32))


def by_hand(x: mx.array, experts: mx.array, versions: Sequence[ExpertLora | None]) -> mx.array:
    """The products (2, T, chosen, O), one token and expert after the other."""
    products = []
    for row, version in enumerate(versions):
        for token, chosen in enumerate(experts[row].tolist()):
            for expert in chosen:
                if version is None:
                    products.append(mx.zeros(OUTPUTS))
                else:
                    a_IR, b_RO = version.groups["layer"].a_IK[expert], version.b_ERO["layer"][expert]
                    products.append(x[row, token] @ a_IR @ b_RO)
    return mx.stack(products).reshape(*experts.shape, OUTPUTS)


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("chosen_versions", [(0, 0), (0, 1), (1, 0), (-1, 1), (1, -1)])
def test_rows_get_the_products_of_their_own_versions(is_sorted: bool, chosen_versions: tuple[int, int]) -> None:
    versions = [weights(1), weights(2, rank=expert_rank(9))]
    x, experts = rows(9)
    stacked = stack_experts(versions)
    index_B = mx.array(chosen_versions)
    wide, indices, inverse = x[:, :, None, None], experts, None
    if is_sorted:
        wide, indices, inverse = sort_by_expert(wide, experts)
    y = mx.zeros((*indices.shape, 1, OUTPUTS))
    made = stacked.apply("layer", wide, y, Routing(experts=indices, is_sorted=is_sorted), index_B)[..., 0, :]
    if inverse is not None:
        made = made[inverse].reshape(*experts.shape, OUTPUTS)
    expected = by_hand(x, experts, [None if index < 0 else versions[index] for index in chosen_versions])
    assert mx.allclose(made, expected, rtol=1e-5, atol=1e-4).item()
    other = by_hand(x, experts, [versions[0], versions[1]] if chosen_versions != (0, 1) else [versions[1], None])
    assert not mx.allclose(made, other, rtol=1e-2, atol=1e-2).item()


def test_products_of_many_rows_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = [weights(1), weights(2)]
    x, experts = rows(9)
    wide, indices, _ = sort_by_expert(x[:, :, None, None], experts)
    routing, y = Routing(experts=indices, is_sorted=True), mx.zeros((*indices.shape, 1, OUTPUTS))
    index_B = mx.array([0, 1])
    whole = stack_experts(versions).apply("layer", wide, y, routing, index_B)
    monkeypatch.setattr("parallm.model.lora.experts.MAX_UNSORTED", 7)
    assert mx.array_equal(stack_experts(versions).apply("layer", wide, y, routing, index_B), whole).item()


def test_rows_of_one_version_stay_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    x, experts = rows(9)
    wide, indices, _ = sort_by_expert(x[:, :, None, None], experts)
    orders: list[bool] = []
    product = Routing.product

    def noted(routing: Routing, x: mx.array, weights_EIO: mx.array) -> mx.array:
        orders.append(routing.is_sorted)
        return product(routing, x, weights_EIO)

    monkeypatch.setattr(Routing, "product", noted)
    y = mx.zeros((*indices.shape, 1, OUTPUTS))
    for versions in ([weights(1)], [weights(1), weights(2)]):
        stack_experts(versions).apply("layer", wide, y, Routing(experts=indices, is_sorted=True), mx.array([0, -1]))
    assert orders == [True, True, False, False]


def test_widened_factors_give_the_same_products_and_gradients() -> None:
    targets = ("gate", "up")
    a_EIR = {
        name: mx.random.normal((NUM_EXPERTS, INPUTS, RANK), key=mx.random.key(4 + i)) for i, name in enumerate(targets)
    }
    b_ERO = {
        name: mx.random.normal((NUM_EXPERTS, RANK, OUTPUTS), key=mx.random.key(6 + i)) for i, name in enumerate(targets)
    }
    apart = expert_lora(a_EIR, b_ERO, [targets])
    wide = apart.widened()
    assert wide.structure() != apart.structure()
    assert apart.groups["gate"].cuts == (RANK,)
    assert wide.groups["gate"].cuts is None
    x, experts = rows(40)
    sorted_x, indices, _ = sort_by_expert(x[:, :, None, None], experts)
    routing, y = Routing(experts=indices, is_sorted=True), mx.zeros((*indices.shape, 1, OUTPUTS))

    def products(lora: ExpertLora) -> list[mx.array]:
        return [lora.apply(target, sorted_x, y, routing) for target in targets]

    for narrow, made in zip(products(apart), products(wide), strict=True):
        assert mx.allclose(narrow, made, rtol=1e-5, atol=1e-4).item()

    def loss(arrays: list[mx.array], *, widens: bool) -> mx.array:
        lora = expert_lora(
            dict(zip(targets, arrays[:2], strict=True)), dict(zip(targets, arrays[2:], strict=True)), [targets]
        )
        gate, up = products(lora.widened() if widens else lora)
        return (gate.sin() * up).sum()

    arrays = [*a_EIR.values(), *b_ERO.values()]
    for narrow, made in zip(*(mx.grad(partial(loss, widens=widens))(arrays) for widens in (False, True)), strict=True):
        assert narrow.shape == made.shape
        assert float(mx.linalg.norm(narrow - made).item()) < 1e-4 * float(mx.linalg.norm(narrow).item())
    stacked = stack_experts([wide, apart])
    index_B = mx.array([0, 1])
    alone = stack_experts([apart, apart])
    for target in targets:
        found, expected = (each.apply(target, sorted_x, y, routing, index_B) for each in (stacked, alone))
        assert mx.allclose(found, expected, rtol=1e-4, atol=1e-3).item()


def test_an_infinite_version_does_not_reach_other_rows() -> None:
    broken = expert_lora(
        {"layer": mx.full((NUM_EXPERTS, INPUTS, RANK), 3e38)}, {"layer": mx.ones((NUM_EXPERTS, RANK, OUTPUTS))}, ()
    )
    x, experts = rows(3)
    y = mx.zeros((2, 3, 2, 1, OUTPUTS))
    routing = Routing(experts=experts, is_sorted=False)
    made = stack_experts([broken, weights(1)]).apply("layer", x[:, :, None, None], y, routing, mx.array([0, 1]))
    assert mx.isfinite(made[1]).all().item()
    assert not mx.isfinite(made[0]).all().item()


def test_gradients_are_those_of_products_by_hand() -> None:
    x, experts = rows(40)
    versions = weights(1)
    structure = versions.structure()
    slope = mx.random.normal((2, 40, 2, OUTPUTS), key=mx.random.key(5))

    def gathered(arrays: list[mx.array], x: mx.array) -> mx.array:
        wide, indices, inverse = sort_by_expert(x[:, :, None, None], experts)
        y = mx.zeros((*indices.shape, 1, OUTPUTS))
        made = structure.lora(arrays).apply("layer", wide, y, Routing(experts=indices, is_sorted=True))
        return (made[inverse].reshape(slope.shape) * slope).sum()

    def plain(arrays: list[mx.array], x: mx.array) -> mx.array:
        return (by_hand(x, experts, [structure.lora(arrays)] * 2) * slope).sum()

    made, expected = (mx.grad(f, argnums=(0, 1))(versions.arrays(), x) for f in (gathered, plain))
    for one, other in zip([*made[0], made[1]], [*expected[0], expected[1]], strict=True):
        assert mx.linalg.norm(one - other).item() < 1e-5 * mx.linalg.norm(other).item()


def adapted(model: SharedModel, lora: LoraBinding | None, tokens: mx.array = LONG) -> mx.array:
    return model.head(model.hidden(tokens, model.make_cache(), lora).flatten(0, 1))


def lora_of(adapter: Adapter, model: SharedModel) -> SingleLora:
    return single_lora(adapter.arrays, lora_scaling(adapter, model))


@pytest.mark.parametrize(
    "architecture", ["mixtral", "qwen3_moe", "gpt_oss", "nemotron_h", "lfm2_moe", "granitemoehybrid"]
)
@pytest.mark.parametrize("tokens", [SHORT, LONG])
def test_an_adapted_mixture_computes_as_its_merged_weights(
    architecture: str,
    tokens: mx.array,
    tiny_model: Callable[[str], Path],
    load_tiny: Callable[..., SharedModel],
    variant: Callable[..., Adapter],
) -> None:
    model = load_tiny(architecture, targets=EVERYTHING)
    adapter = variant(model, ranks={"down_proj": 2} if architecture == "mixtral" else {})
    base, config = load_base(tiny_model(architecture), "")
    plain_TV = base(tokens)[0]
    fuse(base, config, adapter, None, None)
    made_TV, expected_TV = adapted(model, lora_of(adapter, model), tokens), base(tokens)[0]
    scale = mx.abs(expected_TV).max().item()
    assert mx.abs(made_TV - expected_TV).max().item() < 1e-4 * scale
    assert mx.abs(plain_TV - expected_TV).max().item() > 1e-2 * scale


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("how", ["packed", "unpacked"])
def test_quantized_experts_are_bases(
    mode: str, how: str, tiny_quantized: Callable[..., Path], variant: Callable[..., Adapter]
) -> None:
    folder = tiny_quantized("qwen3_moe", bits=4, mode=mode)
    lora = LoraSettings(targets="experts")
    model = load_shared_model(ModelSettings(path=str(folder), quantized=how, lora=lora))  # type: ignore[arg-type]
    adapter = variant(model)
    base, config = load_base(folder, "")
    fuse(base, config, adapter, mx.float32, None)
    made_TV, expected_TV = adapted(model, lora_of(adapter, model)), base(LONG)[0]
    assert mx.abs(made_TV - expected_TV).max().item() < 1e-4 * mx.abs(expected_TV).max().item()


def test_rows_of_several_versions_get_the_bits_that_they_get_alone(
    load_tiny: Callable[..., SharedModel], variant: Callable[..., Adapter]
) -> None:
    model = load_tiny("qwen3_moe", targets=EVERYTHING)
    versions = [variant(model, 1), variant(model, 2, rank=6), None]
    alone = []
    for version in versions:
        lora = None if version is None else lora_of(version, model)
        alone.append(model.hidden(LONG, model.make_cache(), lora))
    selector = LoraSelector(model)
    tokens = mx.repeat(LONG, 6, axis=0)
    chosen = [0, 2, 1, 1, 0, 2]
    together = model.hidden(tokens, model.make_cache(), selector.select([versions[index] for index in chosen]))
    for row, index in enumerate(chosen):
        assert mx.allclose(together[row], alone[index][0], rtol=1e-5, atol=1e-5).item()
    assert not mx.allclose(alone[0], alone[1], rtol=1e-2, atol=1e-2).item()


def test_packed_weights_of_experts_are_chosen_by_the_version_of_each_row(
    load_tiny: Callable[..., SharedModel], variant: Callable[..., Adapter]
) -> None:
    model = load_tiny("qwen3_moe", targets="experts")
    singles = [lora_of(variant(model, seed), model) for seed in (1, 2)]
    stacked = concatenate_loras(singles, model.targets)
    index = [1, -1, 0, 1]
    experts = stacked.weights.experts
    layout = PackedLayout(groups={}, num_arrays=1, experts=experts.structure())
    packed = SegmentedLora(
        weights=PackedLora(layout=layout, arrays=(mx.zeros((2, 1)),), experts=experts),
        order_B2=order_rows(index, 2),
        index_B=mx.array(index),
    )
    rebuilt = packed.structure().lora(packed.arrays())
    tokens = mx.repeat(LONG, 4, axis=0)
    expected = model.hidden(tokens, model.make_cache(), stacked.select(index))
    assert mx.array_equal(model.hidden(tokens, model.make_cache(), packed), expected).item()
    assert rebuilt.structure() == packed.structure()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointed_layers_have_the_same_gradients(
    dropout: float, load_tiny: Callable[..., SharedModel], variant: Callable[..., Adapter]
) -> None:
    model = load_tiny("mixtral", targets=EVERYTHING)
    single = lora_of(variant(model), model)

    def gradients(enabled: bool) -> list[mx.array]:
        def loss(arrays: list[mx.array]) -> mx.array:
            lora = training_lora(single.structure().lora(arrays), dropout, mx.random.key(3))
            with checkpointed(model, enabled):
                return mx.square(model.hidden(LONG, None, lora)).sum()

        made: list[mx.array] = mx.grad(loss)(single.arrays())
        return made

    for plain, other in zip(gradients(False), gradients(True), strict=True):
        assert mx.abs(plain).max().item() > 0
        assert mx.allclose(plain, other, rtol=1e-4, atol=1e-4).item()


def test_a_pass_counts_the_experts_that_a_token_chooses(load_tiny: Callable[..., SharedModel]) -> None:
    model = load_tiny("mixtral")
    linears = 2 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 64 + 4)  # queries, keys and values, outputs, the router
    experts = 2 * 2 * 3 * (64 + 96)  # two of four
    assert model.experts_per_token == 2
    assert activation_bytes(model) == 4 * (linears + experts)


def test_mlx_lm_reads_what_is_written_and_its_adapters_are_read(
    tiny_model: Callable[[str], Path],
    load_tiny: Callable[..., SharedModel],
    variant: Callable[..., Adapter],
    tmp_path: Path,
) -> None:
    model = load_tiny("qwen3_moe", targets=EVERYTHING)
    adapter = variant(model)
    write_mlx(adapter, tmp_path, num_layers=2)
    theirs, _ = load_with_mlx_lm(str(tiny_model("qwen3_moe")), adapter_path=str(tmp_path))
    assert mx.allclose(theirs(LONG)[0], adapted(model, lora_of(adapter, model)), rtol=1e-4, atol=1e-3).item()
    assert read_adapter(tmp_path, model.targets).digest == adapter.digest
    switch = "model.layers.0.mlp.switch_mlp.down_proj"
    stored = mx.load(str(tmp_path / "adapters.safetensors"))
    assert stored[f"{switch}.lora_a"].shape == (4, 4, 32)  # experts, rank, inputs
    assert stored[f"{switch}.lora_b"].shape == (4, 64, 4)
