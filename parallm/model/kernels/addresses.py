"""The addresses of arrays on the device, which MLX does not tell, by a kernel that is given them."""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.kernels.cuda import kernel

ARRAYS_OF_LAUNCH = 32


def addresses(arrays: Sequence[mx.array]) -> list[int | None]:
    """The address of the first number of each array, which is evaluated; None where others lie between its numbers."""
    mx.eval(arrays)
    where_it_is, if_copied = (_launch(arrays, copies_views=copies_views) for copies_views in (False, True))
    return [one if one == other else None for one, other in zip(where_it_is, if_copied, strict=True)]


def _launch(arrays: Sequence[mx.array], *, copies_views: bool) -> list[int]:
    """The addresses; with `copies_views` MLX copies arrays whose numbers are not one after the other."""
    names = [f"array{index}" for index in range(ARRAYS_OF_LAUNCH)]
    pointers = ", ".join(f"const void* {name}" for name in names)
    find = kernel("addresses", (("POINTERS", pointers), ("NAMES", ", ".join(names))), copies_views=copies_views)
    launches = []
    for start in range(0, len(arrays), ARRAYS_OF_LAUNCH):
        given = arrays[start : start + ARRAYS_OF_LAUNCH]
        launches += find(
            [*given, *[given[0]] * (ARRAYS_OF_LAUNCH - len(given))],
            grid=(ARRAYS_OF_LAUNCH, 1, 1),
            threadgroup=(ARRAYS_OF_LAUNCH, 1, 1),
            output_shapes=[(ARRAYS_OF_LAUNCH,)],
            output_dtypes=[mx.uint64],
        )
    mx.eval(launches)
    found: list[int] = [address for launch in launches for address in launch.tolist()]
    return found[: len(arrays)]
