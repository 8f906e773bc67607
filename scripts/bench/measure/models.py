"""Several models in one process."""

from statistics import fmean

from bench.compare import print_table
from bench.measurement import Bar, Figures, Request, measurement
from bench.processes import work


@measurement(
    {
        "models.itl_ratio_while_loading": Bar(max=1.5),
        "models.longest_gap_while_loading": Bar(),
        "models.control_longest_gap": Bar(),
        "models.control_itl_ratio": Bar(min=1.5),
    },
    minutes=2,
)
def model_loads(request: Request) -> Figures:
    """Mean time between tokens of a stream while another model loads, over that of the stream alone; the longest gap.

    The control loads in one call, between two steps of the stream.
    """
    units, whole = (work("model_loads", loads=request.size(6, 1), is_whole=is_whole) for is_whole in (False, True))
    rows = [
        (name, 1e3 * fmean(one["alone"]), 1e3 * fmean(one["loading"]), 1e3 * max(one["loading"]))
        for name, one in (("in units", units), ("in one call", whole))
    ]
    print_table("Time between tokens, ms: alone, while a model of 400 MB loads, the longest", rows)
    return {
        "models.itl_ratio_while_loading": fmean(units["loading"]) / fmean(units["alone"]),
        "models.longest_gap_while_loading": max(units["loading"]),
        "models.control_longest_gap": max(whole["loading"]),
        "models.control_itl_ratio": fmean(whole["loading"]) / fmean(whole["alone"]),
    }
