"""Seeds from seeds, so that every random choice of a run follows from its one seed."""

import numpy as np
import numpy.typing as npt

MASK_64 = (1 << 64) - 1


def mix(seed: int, index: int) -> int:
    """Return a 64-bit number whose every bit depends on both arguments (splitmix64: https://prng.di.unimi.it)."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)


def mix_all(seeds_N: npt.NDArray[np.uint64], indices_N: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `mix` of each pair, (N,), with equal bits."""
    state_N = seeds_N + (indices_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state_N = (state_N ^ (state_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state_N = (state_N ^ (state_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state_N ^ (state_N >> np.uint64(31))
