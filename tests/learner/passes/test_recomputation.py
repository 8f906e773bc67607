import pytest

from parallm.errors import ConfigError
from parallm.learner.passes import recomputation
from parallm.learner.passes.recomputation import activation_bytes, checkpoints_layers, pass_tokens
from parallm.learner.settings import LearnerSettings
from parallm.model.shared_model import SharedModel


def test_a_pass_on_a_cpu_has_1024_tokens_unless_a_number_is_given() -> None:
    assert pass_tokens(LearnerSettings()) == 1024
    assert pass_tokens(LearnerSettings(micro_batch_tokens=300)) == 300


def test_what_a_pass_keeps_counts_the_inputs_and_outputs_of_all_linear_layers(nano: SharedModel) -> None:
    layer = nano.base.layers[0]
    linears = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj]
    linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]
    assert activation_bytes(nano) == 4 * nano.num_layers * sum(sum(one.linear.weight.shape) for one in linears)


def test_layers_are_checkpointed_where_a_pass_would_need_half_of_the_memory(
    nano: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 1000 * activation_bytes(nano)
    for room, expected in ((2.1 * needed, False), (1.9 * needed, True)):
        monkeypatch.setattr(recomputation, "device_memory", lambda room=room: nano.base_bytes + room)
        assert checkpoints_layers(LearnerSettings(), nano, 1000) is expected
    assert not checkpoints_layers(LearnerSettings(checkpoint_layers="none"), nano, 10**9)
    assert checkpoints_layers(LearnerSettings(checkpoint_layers="all"), nano, 1)


def test_a_model_without_a_list_of_layers_is_refused_or_left_alone(
    nano: SharedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recomputation, "can_checkpoint", lambda _: False)
    with pytest.raises(ConfigError, match=r"learner\.checkpoint_layers=all"):
        checkpoints_layers(LearnerSettings(checkpoint_layers="all"), nano, 1)
    assert not checkpoints_layers(LearnerSettings(), nano, 10**9)
