"""The page of a process: static files, open to all who reach the server. What they show comes from other routes."""

from pathlib import Path

from fastapi import APIRouter
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from parallm.server.connection import error_response
from parallm.server.dashboard.answers import PageHost
from parallm.server.dashboard.assets import INDEX, PREFIX, Asset, Assets
from parallm.server.failures import Failure
from parallm.server.settings import ServerSettings

FOREVER = "public, max-age=31536000, immutable"
PAGE_FOLDER = Path(__file__).parent / "page"
SERVER = {"server": "ParaLLM", "openapi": "/openapi.json"}


def page_routes(host: PageHost, folder: Path = PAGE_FOLDER) -> APIRouter:
    """Return the routes of the page in `folder`. Where Ollama's routes are served, `/` is one of them."""
    router, assets = APIRouter(), Assets(folder)

    if not host.settings.ollama:

        @router.get("/")
        async def root(http: Request) -> Response:
            """Lead browsers to the page; tell programs what this is."""
            return to_page() if wants_page(http.headers) else JSONResponse(SERVER)

    @router.get("/dashboard")
    async def without_slash() -> Response:
        """Lead to `/dashboard/`: the page names its files beside itself."""
        return to_page("dashboard/")

    @router.get("/dashboard/")
    async def index(http: Request) -> Response:
        """The page that shows a run, reads its samples and acts on it."""
        found = assets.find(INDEX)
        return _not_found(INDEX) if found is None else _answer(http, found, "no-cache")

    @router.get("/dashboard/{digest}/{path:path}")
    async def file(http: Request, digest: str, path: str) -> Response:
        """A file of the page. The digest is that of all files, so that browsers may keep each for ever."""
        if digest != assets.digest:
            return _not_found(path, "the page has changed; load it again")
        found = await host.workers.run(lambda: assets.find(path)) if assets.is_large(path) else assets.find(path)
        return _not_found(path) if found is None else _answer(http, found, FOREVER)

    return router


def page_url(settings: ServerSettings, url: str | None) -> str | None:
    """Return the page's address on a server with this one; None where no page is served, or not over TCP."""
    return f"{url}{PREFIX}/" if settings.dashboard and url and url.startswith("http") else None


def to_page(address: str = PREFIX.lstrip("/") + "/") -> Response:
    """Return what leads to the page, by an address beside the present one: a proxy may have put a prefix before it."""
    return RedirectResponse(address, 307, headers={"Cache-Control": "no-store"})


def wants_page(headers: Headers) -> bool:
    """Return whether a browser asks for something to look at."""
    return "text/html" in headers.get("accept", "")


def _answer(http: Request, asset: Asset, cache_control: str) -> Response:
    headers = {"Cache-Control": cache_control, "Vary": "Accept-Encoding", "Content-Type": asset.media_type}
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(asset.compressed, headers={**headers, "Content-Encoding": "gzip"})
    return Response(asset.content, headers=headers)


def _not_found(path: str, way_out: str = "the page has no such file") -> Response:
    return error_response(Failure(404, "unknown_url", message=f"{path[:200]}: {way_out}"))
