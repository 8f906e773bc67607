"""Age of sampled tokens: versions between the learner's present one and the one that sampled them. Pure."""

from collections.abc import Iterable, Iterator, Sequence

from parallm.reports import OffPolicyReport
from parallm.types import Trajectory, TrajectoryGroup


def is_stale(trajectories: Iterable[Trajectory], version: int, limit: int) -> bool:
    """Whether a trained token is more than `limit` versions older than `version`, or of an abandoned later version.

    One such token condemns its group: without it the completions that are left would be compared with others than those
    they were sampled with, mostly without the longest ones.
    """
    return any(not 0 <= lag <= limit for lag, _ in _lags(trajectories, version))


def off_policy_report(groups: Sequence[TrajectoryGroup], version: int, dropped: int) -> OffPolicyReport:
    """Return the ages of the trained tokens in `groups` for a learner at `version`."""
    lags = [pair for group in groups for pair in _lags(group.trajectories, version)]
    num_tokens = sum(count for _, count in lags)
    return OffPolicyReport(
        lag_mean=sum(lag * count for lag, count in lags) / max(num_tokens, 1),
        lag_max=max((lag for lag, _ in lags), default=0),
        dropped=dropped,
    )


def _lags(trajectories: Iterable[Trajectory], version: int) -> Iterator[tuple[int, int]]:
    """Yield (lag, trained tokens) of each span that has any."""
    for trajectory in trajectories:
        for span in trajectory.weight_versions:
            mask_T = trajectory.loss_mask
            is_all = (span.start, span.end) == (0, len(mask_T))  # mostly: no slice is needed
            count = (mask_T if is_all else mask_T[span.start : span.end]).count(True)
            if count:
                yield version - span.version, count
