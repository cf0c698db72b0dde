"""The page at /: plain files that come with the package, read once. Nothing else can be asked for by name."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.responses import Response

from colar.look.page import viewer
from colar.serve.errors import ApiError

FOLDER = Path(__file__).parent / "page"
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page needs nothing from elsewhere, and no other site may frame it."""


class Page:
    """The files of a folder by name, and those that pages share; none where there is no folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        paths = sorted(folder.iterdir()) if folder.is_dir() else []
        self.files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        if self.files:
            # The chain viewer and the theme are not this page's own: `colar inspect` has them too.
            self.files |= {path.name: path.read_bytes() for path in viewer.FILES}

    def response(self, name: str) -> Response:
        """A file. ApiError 404 where there is none of that name."""
        if name not in self.files:
            raise ApiError(404, f"there is no page here: no file {name!r}", code="not_found")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        return Response(self.files[name], headers=HEADERS, media_type=kind)
