"""The page at `/` and its files.

The page is static: it asks the other endpoints for all that it shows, with the key that its user gives it. The
browser is told to load nothing from elsewhere, so that text of a model cannot send anything anywhere.
"""

from __future__ import annotations

from importlib import resources

from aiohttp import web

_TYPES = {
    "html": "text/html",
    "js": "text/javascript",
    "css": "text/css",
    "svg": "image/svg+xml",
}
FILES = (
    "index.html",
    "page.js",
    "chat.js",
    "cache.js",
    "advice.js",
    "reuse.js",
    "style.css",
    "icon.svg",
    "vendor/marked.umd.js",
    "vendor/purify.min.js",
)
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # A server that was updated is another page.
    "Cache-Control": "no-cache",
}


PAGES = ("/", *(f"/{name}" for name in FILES))


async def page(request: web.Request) -> web.Response:
    """Return the page, or one of its files."""
    name = request.path[1:] or "index.html"
    data = resources.files("llamaslot.api").joinpath("webui", name).read_bytes()
    response = web.Response(body=data, content_type=_TYPES[name.rpartition(".")[2]], headers=_HEADERS)
    response.charset = "utf-8"
    response.enable_compression()
    return response
