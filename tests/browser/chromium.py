"""Where the browser is: Debian's chromium or Chrome, or what `LLAMASLOT_BROWSER` names."""

from __future__ import annotations

import os
import shutil

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("LLAMASLOT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
NO_SANDBOX = ["--no-sandbox"]
"""A container's root may not use the browser's own; the pages are ours."""
