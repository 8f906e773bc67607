"""What is made of adapters for the kernels is made once for each set of versions, whatever rows use them."""

from collections.abc import Callable
from dataclasses import replace

from parallm.engine.views import AdapterViews
from parallm.model.adapter import Adapter
from parallm.model.row_lora import RowAdapters
from parallm.model.shared_model import SharedModel


def test_rows_of_the_same_versions_share_their_factors(
    load_tiny: Callable[..., SharedModel], random_adapter: Callable[..., Adapter]
) -> None:
    model = load_tiny("llama")
    alone = [site for site in model.sites if not any(site in sites for sites in model.joined)]
    views = AdapterViews(replace(model, groups=(*model.joined, *((site,) for site in alone))))
    one, two = random_adapter(model, 1, rank=8), random_adapter(model, 2, rank=8)
    first, again, other = (views.for_rows(rows) for rows in ([one, None, two], [one, None, two], [two, one, two, one]))
    assert isinstance(first, RowAdapters)
    assert isinstance(other, RowAdapters)
    assert again is first
    assert other.layout is first.layout
    assert all(one is other for one, other in zip(first.arrays()[1:], other.arrays()[1:], strict=True))
    assert first.order_B2.tolist() == [[1, -1], [0, 0], [2, 1]]
    assert other.order_B2.tolist() == [[1, 0], [3, 0], [0, 1], [2, 1]]
    assert views.for_rows([None, None]) is None
