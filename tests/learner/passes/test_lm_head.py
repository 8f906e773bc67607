import mlx.core as mx
import pytest

from parallm.learner.passes import lm_head
from parallm.learner.passes.lm_head import ChunkedHead
from parallm.model.shared_model import SharedModel

TOKENS = 640
"""Of a chunk."""


@pytest.fixture
def head(nano: SharedModel, monkeypatch: pytest.MonkeyPatch) -> ChunkedHead:
    monkeypatch.setattr(lm_head, "has_kernels", lambda: True)
    return ChunkedHead(nano, TOKENS * nano.dtype.size * nano.vocabulary_size)


def test_chunks_are_alike_and_hardly_padded(head: ChunkedHead) -> None:
    sizes = set[int]()
    for count in range(1, 8 * TOKENS):
        padded, size = head.padded_size(count), head._size(count)
        assert padded % size == 0
        assert padded // size == -(-count // TOKENS), "no more chunks than are needed"
        assert head._size(padded) == size, "whoever gets the padded tokens cuts them alike"
        assert padded - count < 64 * (padded // size)
        sizes.add(size)
    assert len(sizes) <= TOKENS // 64
    assert head.padded_size(0) == 0


def test_padding_changes_no_score(head: ChunkedHead, nano: SharedModel) -> None:
    count = TOKENS + 10
    hidden_NH = mx.random.normal((head.padded_size(count), nano.base.args.hidden_size))
    tokens_N = mx.arange(count) % nano.vocabulary_size
    padded = head.score(hidden_NH, tokens_N, mx.ones(count))
    assert len(padded.chunks) == 2
    assert {len(chunk.tokens_N) for chunk in padded.chunks} == {len(hidden_NH) // 2}
    plain = ChunkedHead(nano, 1 << 30).score(hidden_NH[:count], tokens_N, mx.ones(count))
    assert mx.allclose(padded.logprobs_N, plain.logprobs_N, atol=1e-5)
    assert padded.logprobs_N.shape == (count,)
