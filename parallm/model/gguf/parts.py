"""Models in several files, as gguf-split cuts them: `NAME-00001-of-00003.gguf` and so on. Imports no MLX.

The first part has all metadata, each part some of the tensors, and all of them their number under `split.no`:
https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split.
"""

import re
from pathlib import Path
from types import MappingProxyType

from parallm.model.gguf.file import GgufFile, Tensor, read_gguf

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
MAX_PARTS = 4096


def part_paths(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` is a part of, by its name alone; `path` itself if its name is not that of a
    part."""
    match = PART.fullmatch(path.name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]) <= MAX_PARTS:
        return (path,)
    names = (
        f"{match['stem']}-{number:05}-of-{match['count']}{match['suffix']}"
        for number in range(1, int(match["count"]) + 1)
    )
    return tuple(map(path.with_name, names))


def is_later_part(path: Path) -> bool:
    """Whether a name is that of a part after the first one."""
    return part_paths(path)[0] != path


def stem_of(path: Path) -> str:
    """The name of a model's file, without what tells a part."""
    match = PART.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


def read_parts(path: Path) -> GgufFile:
    """Map a file, with the other parts of its model beside it, and read their headers. Raises ModelError."""
    first = read_gguf(path)
    count = first.integer("split.count", 0, least=0)
    if count <= 1:
        return first
    paths = part_paths(path)
    if len(paths) != count:
        raise first.error(
            f"it is one of {count} parts, and its name does not tell those of the others; give them the names "
            f"NAME-00001-of-{count:05}.gguf and so on"
        )
    if path != paths[0] or first.integer("split.no", least=0) != 0:
        raise first.error(f"it is a later part of its model; name the first one, {paths[0].name}")
    tensors = dict[str, Tensor]()
    for number, place in enumerate(paths):
        if not place.is_file():
            raise first.error(f"{place.name} is missing beside it, one of its {count} parts; copy or download it, too")
        part = read_gguf(place) if number else first
        given = (part.integer("split.no", least=0), part.integer("split.count", least=0))
        if given != (number, count):
            raise part.error(f"it calls itself part {given[0]} of {given[1]}, and is {number} of {count} by its name")
        if twice := tensors.keys() & part.tensors.keys():
            raise part.error(f"the tensor {min(twice)!r} is in an earlier part, too; the files are of different models")
        tensors |= part.tensors
    if (total := first.integer("split.tensors.count", len(tensors), least=0)) != len(tensors):
        raise first.error(f"its {count} parts have {len(tensors)} tensors, and should have {total}; download them anew")
    return GgufFile(path=path, metadata=first.metadata, tensors=MappingProxyType(tensors))
