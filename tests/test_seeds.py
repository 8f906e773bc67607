import numpy as np

from parallm.seeds import MASK_64, mix, mix_all


def test_seeds_mixed_together_have_the_bits_of_seeds_mixed_alone() -> None:
    seeds = [0, 1, 77, 2**63, MASK_64, 0x9E3779B97F4A7C15]
    indices = [0, 5, 8191, 0, 3, 1]
    together = mix_all(np.array(seeds, np.uint64), np.array(indices, np.uint64))
    assert together.tolist() == [mix(seed, index) for seed, index in zip(seeds, indices, strict=True)]
    assert together[0] == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0
