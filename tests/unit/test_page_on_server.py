"""The page and the server agree: the embedded model, served, seen in a real browser.

Not here: what the page shows of each kind of reply and failure, which a server of straw can produce at will.
"""

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from dspark.engine.async_engine import AsyncEngine
from support.browser import Browser, why_no_browser
from support.servers import live_server

REASON = why_no_browser()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"needs a browser: {REASON}")


@pytest.fixture(scope="module")
def browser():
    with live_server(AsyncEngine()) as live, Browser() as browser:
        browser.open(live.url)
        browser.wait_text("#state", "ready")
        yield browser


def test_a_reply_is_marked_token_by_token(browser):
    browser.run("document.querySelector('#max-tokens').value = 40")
    browser.type("#prompt", "How do I read a file line by line in Python?")
    browser.press("Enter")
    browser.wait("document.querySelector('.again')", seconds=60)
    text = browser.text(".reply .body")
    assert text.strip()
    # What is outside the groups of rounds has no known token.
    assert browser.text(".reply .round").replace("\n", "") == text.replace("\n", "")
    assert browser.count(".reply .token.own") and browser.count(".reply .token.draft")
    summary = browser.text(".summary")
    assert "rounds" in summary and "accepted length" in summary and "seed 0" in summary


def test_the_same_seed_gives_the_same_tokens(browser):
    browser.click(".again")
    browser.wait("document.querySelector('.same')", seconds=60)
    assert browser.text(".same") == "the same tokens as before"


def test_the_panel_has_counted_the_rounds(browser):
    browser.wait("Number(document.querySelector('#length-now').textContent) > 1")
    browser.wait_text("#running", "0")
    assert browser.text("#speculation") == "Speculation is running."
    assert browser.count("#positions .bar") == 5
    assert "free" in browser.text("#pages-note")


def test_the_policy_of_the_server_lets_all_of_it_run_and_nothing_else(browser):
    assert browser.complaints() == []
    browser.run("document.body.setAttribute('style', 'color: red'); fetch('http://127.0.0.1:9/').catch(() => {})")
    complaints = " ".join(browser.complaints())
    assert "style-src" in complaints and "connect-src" in complaints
