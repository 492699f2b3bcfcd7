"""The browser that shows pages in tests."""

import os
from pathlib import Path

import pytest

BROWSER = "/usr/bin/chromium"


def require_browser() -> None:
    """Skip a module where there is no browser. Continuous integration installs it, so there a missing one fails."""
    if not os.environ.get("CI"):
        pytest.importorskip("playwright.sync_api")
        if not Path(BROWSER).exists():
            pytest.skip(f"there is no browser {BROWSER}", allow_module_level=True)
