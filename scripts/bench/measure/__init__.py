"""What is measured. Importing this package registers all measurements, in the order of running."""

from bench.measure import quality, engine, learner, hybrid, serving, learning, vllm, training, start, runs, workers  # noqa: F401, I001  # in this order
from bench.measure import hybrid_rollouts, front, tensor_parallel, replicas, service, models, tasks  # noqa: F401  # in this order
from bench.measure import experts, products, rollout_parts, watchers, from_tests  # noqa: F401  # in this order
