"""Forms with a file, bounded while they stream in."""

from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from parallm.errors import InvalidRequest
from parallm.server.connection import bounded_chunks

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    file_name: str
    content: bytes
    """Bytes of the file."""
    fields: dict[str, str]


def is_form(http: Request) -> bool:
    return http.headers.get("content-type", "").lower().startswith("multipart/form-data")


async def read_form(http: Request, max_bytes: int, setting: str) -> Form:
    """Read a form with one file. Raises BodyTooLarge as `read_body` does, InvalidRequest."""
    chunks = bounded_chunks(http, max_bytes, setting)
    parser = MultiPartParser(http.headers, chunks, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        parsed = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequest(f"the form cannot be read: {error.message}") from error
    try:
        files = [item for item in parsed.values() if isinstance(item, UploadFile)]
        if not files:
            raise InvalidRequest("the form has no file; send the adapter's file as one of its parts", "file")
        fields = {name: item for name, item in parsed.items() if isinstance(item, str)}
        return Form(file_name=files[0].filename or "", content=await files[0].read(), fields=fields)
    finally:
        await parsed.close()
