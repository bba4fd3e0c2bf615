"""Fixtures for a headless Chromium of the system and pages open in it."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from esbench.report.web.render import page
from esbench.schema import Run
from tests.report.web_cases import NEW, OLD, usual_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, ViewportSize

NAMES = (
    *("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"),
    *("chromium-headless-shell", "microsoft-edge"),
)
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
LAPTOP: "ViewportSize" = {"width": 1280, "height": 800}
PHONE: "ViewportSize" = {"width": 360, "height": 740}

Open = Callable[..., "Page"]
Violations = Callable[["Page"], list[dict[str, Any]]]


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test with a reason; fail it instead if a browser is required."""
    if os.environ.get("ESBENCH_BROWSER") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def browser() -> "Iterator[Browser]":
    """Return the browser, with a fresh profile."""
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415  it need not be installed
    except ModuleNotFoundError:
        skip_or_fail(
            "there is no playwright: pip install playwright axe-playwright-python, or nox -s browser"
        )
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        skip_or_fail(f"there is no Chromium ({', '.join(NAMES)}): for example apt-get install chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: "Browser", tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens the page of some runs, or a page, at a link; fail on a console message."""
    messages: list[str] = []
    requested: list[str] = []
    contexts: dict[str, BrowserContext] = {}

    def open_(
        runs: Sequence[Run] | str | None = None,
        link: str = "",
        *,
        left_out: Sequence[str] = (),
        name: str = "index",
        **options: Any,
    ) -> "Page":
        file = tmp_path / f"{name}.html"
        if not file.exists():
            three = [usual_run(OLD), usual_run(NEW, 1.3), usual_run("2025", 2.0, "GPU 1")]
            text = runs if isinstance(runs, str) else page(three if runs is None else runs, left_out)
            file.write_text(text, encoding="utf-8")
        key = repr(options)
        if key not in contexts:
            contexts[key] = browser.new_context(**{"viewport": LAPTOP, **options})
            contexts[key].grant_permissions(["clipboard-read", "clipboard-write"])
        tab = contexts[key].new_page()
        tab.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: messages.append(f"error: {error}"))
        tab.on("request", lambda request: requested.append(request.url))
        tab.goto(f"{file.as_uri()}{link}")
        return tab

    yield open_
    for context in contexts.values():
        context.close()
    assert messages == []
    assert {url.partition(":")[0] for url in requested} <= {"file"}


@pytest.fixture
def violations() -> Violations:
    """Return what axe-core finds wrong in a page: rule, impact and element."""
    try:
        from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415  it need not be installed
    except ModuleNotFoundError:
        skip_or_fail(
            "there is no axe-playwright-python: pip install axe-playwright-python, or nox -s browser"
        )

    def found(page: "Page") -> list[dict[str, Any]]:
        violated: list[dict[str, Any]] = Axe().run(page).response["violations"]
        return violated

    return found
