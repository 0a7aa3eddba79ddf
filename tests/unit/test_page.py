"""The page in a real browser, under its own policy: what people see of a reply, of the engine, and of every failure.

Talks to a server of straw. Not here: the real server, which its own tests hold to the same protocol.
"""

import re

import pytest

from support.browser import Browser, why_no_browser
from support.fake_page_server import LONG, PAGE, FakePageServer

REASON = why_no_browser()
needs_browser = pytest.mark.skipif(REASON is not None, reason=f"needs a browser: {REASON}")
TEXT = "The sea is wide and blue, café tables by the shore.\nIt never sleeps."


@pytest.fixture(scope="module")
def window():
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(window):
    """The window, wide and with empty stores; every test is also a test of the policy."""
    window.resize(1280, 900)
    yield window
    complaints = [text for text in window.complaints() if "Failed to load resource" not in text]
    window.run("sessionStorage.clear(); localStorage.clear()")
    window.open("about:blank")
    assert not complaints


@pytest.fixture
def server():
    with FakePageServer() as server:
        yield server


def ask(browser, text, done=".reply:last-of-type .again"):
    browser.type("#prompt", text)
    browser.press("Enter")
    browser.wait("document.querySelector(arguments[0])", done)


def shown(browser, server, text="Tell me"):
    browser.open(server.url)
    ask(browser, text)
    return browser


@needs_browser
def test_each_token_is_marked_by_where_it_comes_from(browser, server):
    shown(browser, server)
    assert browser.text(".reply .body") == TEXT
    assert browser.text(".reply .token.own").split("\n") == ["The", "and", ",", "by", "the", "eeps", "."]
    assert browser.text(".reply .token.draft").split("\n")[:5] == ["sea", "is", "wide", "blue", "caf"]
    assert browser.count(".round") == 7
    title = browser.run("return document.querySelectorAll('.reply .token')[1].title")
    assert title == "accepted draft 1 · round 2: 3 of 5 checked drafts accepted"
    look = (
        "const style = getComputedStyle(document.querySelector(arguments[0]));"
        "return [style.textDecorationLine, style.backgroundColor]"
    )
    own, draft = browser.run(look, ".reply .token.own"), browser.run(look, ".reply .token.draft")
    assert own[0] == "underline" and draft[0] == "none"
    assert own[1] == "rgba(0, 0, 0, 0)" != draft[1]


@needs_browser
def test_marks_can_be_turned_off_and_stay_off(browser, server):
    shown(browser, server)
    browser.click("#show-settings")
    browser.click("#coloured")
    look = "return getComputedStyle(document.querySelector('.reply .token.own')).textDecorationLine"
    assert browser.run(look) == "none"
    assert shown(browser, server).run(look) == "none"


@needs_browser
def test_a_reply_says_what_it_cost_and_draws_its_rounds(browser, server):
    shown(browser, server)
    summary = browser.text(".summary")
    for part in ("19 tokens", "7 rounds", "accepted length 3.00", "6 of 14 prompt tokens from the cache", "by itself"):
        assert part in summary
    assert browser.count(".cell-draft") == 12
    assert browser.count(".cell-own") == 7
    assert browser.count(".cell-rejected") == 13


@needs_browser
def test_the_request_is_what_the_settings_say(browser, server):
    browser.open(server.url)
    browser.click("#show-settings")
    for selector, value in (("#temperature", "0"), ("#max-tokens", "9"), ("#seed", "3")):
        browser.run("document.querySelector(arguments[0]).value = ''", selector)
        browser.type(selector, value)
    browser.type("#system", "Be brief.")
    ask(browser, "one")
    ask(browser, "two")
    body = server.bodies[-1]
    assert {name: body[name] for name in ("temperature", "max_tokens", "seed")} == {
        "temperature": 0,
        "max_tokens": 9,
        "seed": 3,
    }
    assert body["stream"] and body["stream_origins"] and body["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == TEXT


@needs_browser
def test_a_setting_out_of_range_is_not_sent(browser, server):
    browser.open(server.url)
    browser.run("document.querySelector('#max-tokens').value = 0")
    browser.type("#prompt", "one")
    browser.press("Enter")
    browser.wait("!document.querySelector('#settings').hidden")
    assert not server.bodies


@needs_browser
def test_again_says_whether_the_tokens_are_the_same(browser, server):
    shown(browser, server)
    browser.click(".again")
    browser.wait_text(".same", "the same tokens as before")
    assert [message["role"] for message in server.bodies[-1]["messages"]] == ["user"]
    server.reply = LONG
    browser.click(".again")
    browser.wait_text(".same.differs", "other tokens than before")


@needs_browser
def test_stop_ends_the_reply_and_the_request(browser, server):
    server.reply = LONG
    browser.open(server.url)
    ask(browser, "slow", ".round + .round")
    assert browser.is_shown("#stop") and not browser.is_shown("#send")
    browser.click("#stop")
    browser.wait_text(".summary", "stopped by you")
    assert browser.is_shown("#send") and not browser.is_shown("#stop")
    assert 1 < browser.count(".reply .token") < 90
    ask(browser, "slow again", ".reply:last-of-type .round")
    browser.press("Escape")
    browser.wait_text(".reply:last-of-type .summary", "stopped by you")
    assert server.wait_cut(2)


@needs_browser
def test_a_new_chat_forgets_the_dialogue_also_while_a_reply_runs(browser, server):
    server.reply = LONG
    browser.open(server.url)
    ask(browser, "slow", ".round")
    browser.press("Alt", "n")
    browser.wait("document.querySelector('#welcome') && !document.querySelector('.message')")
    server.reply = LONG[:3]
    ask(browser, "next")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["next"]


@needs_browser
def test_an_example_can_be_asked_with_a_click(browser, server):
    browser.open(server.url)
    browser.click("#examples button")
    browser.wait("document.querySelector('.again')")
    assert server.bodies[0]["messages"][0]["content"] == browser.text(".message.user .body")


@needs_browser
def test_shift_enter_begins_a_line(browser, server):
    browser.open(server.url)
    browser.type("#prompt", "one")
    browser.press("Shift", "Enter")
    browser.type("#prompt", "two")
    browser.press("Enter")
    browser.wait("document.querySelector('.again')")
    assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"


@needs_browser
def test_markup_is_text(browser, server):
    shown(browser, server, "markup <i>x</i>")
    assert browser.text(".reply .body") == "<b><img src=x onerror=alert(1)>&amp;"
    assert browser.text(".message.user .body") == "markup <i>x</i>"
    assert browser.count(".message b, .message img, .message i") == 0


@needs_browser
def test_thoughts_and_calls_have_places_of_their_own(browser, server):
    shown(browser, server, "think and call")
    assert browser.text(".thoughts .body") == "Hm so."
    assert browser.text(".thoughts .token.draft").split("\n") == ["so", "."]
    assert browser.text(".call") == 'Call of look_up{"word": "sea"}'
    assert browser.text(".reply > .body").startswith(TEXT)
    assert browser.count(".reply > .body .round") == 7


TRACK = """
const [tokens, texts] = arguments;
return import('/page/track.js').then(({ TokenTrack }) => {
  const track = new TokenTrack();
  track.add(tokens, tokens.map((_, place) => place % 2), 1);
  return texts.map((text) => track.take(text).map(({ text, token }) => [text, token && token.place]));
});
"""


@needs_browser
@pytest.mark.parametrize(
    ("tokens", "texts", "runs"),
    [
        (["ab", "cd"], ["abc", "d"], [[["ab", 0], ["c", 1]], [["d", 1]]]),
        (["a", "</think>", "think"], ["a", "think"], [[["a", 0]], [["think", 2]]]),
        (["a", "\n</think>", "\n", "a"], ["a\n", "\n", "a"], [[["a", 0], ["\n", 1]], [["\n", 2]], [["a", 3]]]),
        (
            ["a", "\ufffd", "b", "c"],
            ["a", "\ufffd\ufffd", "b", "c"],
            [[["a", 0]], [["\ufffd\ufffd", None]], [["b", 2]], [["c", 3]]],
        ),
        (["a", "", "b"], ["ab"], [[["a", 0], ["b", 2]]]),
        ([], ["x"], [[["x", None]]]),
    ],
)
def test_text_finds_its_tokens_also_behind_marks(browser, server, tokens, texts, runs):
    browser.open(server.url)
    assert browser.run(TRACK, tokens, texts) == runs


@needs_browser
@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("fail", "max_tokens must be at least 1, and it is 0."),
        ("busy", "As many requests wait as the engine queues. Try again in 7 s."),
        ("complain", "The engine met its end."),
        ("break", "The connection closed before the reply had ended."),
    ],
)
def test_a_failure_is_a_sentence_and_can_be_tried_again(browser, server, question, sentence):
    browser.open(server.url)
    ask(browser, question, ".alert")
    assert sentence in browser.text(".alert")
    keeps_text = question in ("complain", "break")
    assert browser.count(".reply") == keeps_text
    if keeps_text:
        assert "broken off" in browser.text(".summary")
    browser.click(".alert button")
    browser.wait("document.querySelectorAll('.alert').length === 1")
    ask(browser, "better")
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["better"]


@needs_browser
def test_a_server_that_is_gone_is_said(browser):
    with FakePageServer() as server:
        browser.open(server.url)
        browser.wait_text("#running", "2")
    ask(browser, "hello", ".alert")
    assert "The server does not answer. Is it still running?" in browser.text(".alert")
    browser.wait_text("#state", "unreachable")
    browser.complaints()


@needs_browser
def test_a_key_is_asked_for_and_kept_in_this_tab_only(browser):
    with FakePageServer(key="secret") as server:
        browser.open(server.url)
        browser.wait("!document.querySelector('#key-form').hidden")
        browser.type("#key", "wrong")
        browser.press("Enter")
        browser.wait("document.querySelector('#key').value === '' && !document.querySelector('#key-form').hidden")
        browser.type("#key", "secret")
        browser.press("Enter")
        browser.wait_text("#running", "2")
        ask(browser, "hello")
        assert not browser.is_shown("#key-form")
        assert browser.run("return JSON.stringify(localStorage)").count("secret") == 0


@needs_browser
def test_a_model_that_does_not_chat_continues_the_text(browser):
    with FakePageServer(chats=False) as server:
        browser.open(server.url)
        browser.wait("document.querySelector('#prompt').placeholder.includes('does not chat')")
        ask(browser, "Once upon a time")
        assert server.bodies[-1]["prompt"] == "Once upon a time"
        assert "messages" not in server.bodies[-1]
        assert browser.text(".reply .body") == TEXT


@needs_browser
def test_the_panel_shows_the_engines_numbers(browser, server):
    browser.open(server.url)
    browser.wait_text("#running", "2")
    assert browser.text("#waiting") == "1"
    assert browser.text("#length-now") == "3.34"
    assert browser.text("#length-note") == "tokens per round since the start (95 %: 3.27–3.41)"
    assert browser.text("#positions .value").split("\n") == ["80 %", "63 %", "47 %", "28 %", "16 %"]
    assert browser.text("#verify-lens b").split("\n") == ["4 %", "4 %", "8 %", "13 %", "13 %", "58 %"]
    assert browser.text("#pages-note") == "40 in use, 66 cached, 150 free"
    assert browser.text("#speculation") == "Speculation is running."
    assert browser.text("#model") == "tiny-model, context of 4096 tokens"
    widths = browser.run("return [...document.querySelectorAll('#positions .accepted')].map(e => e.offsetWidth)")
    assert widths == sorted(widths, reverse=True) and widths[0] > 3 * widths[-1] > 0
    server.engine = server.engine | {
        "state": "degraded",
        "reason": "drafts fare badly",
        "speculation": "not running because the accepted length fell to 1.1",
        "num_running": 7,
    }
    browser.wait_text("#running", "7")
    assert browser.text("#state") == "degraded: drafts fare badly"
    assert browser.text("#speculation") == "Speculation is not running because the accepted length fell to 1.1."


@needs_browser
def test_an_engine_without_drafts_or_rounds_has_a_panel_too(browser):
    nothing = {"value": None, "low": None, "high": None}
    acceptance = {"block_size": 0, "rounds": 0, "emitted_tokens": 0, "accepted_len": nothing, "wasted_rows": nothing}
    acceptance |= {"verified": [], "accepted": [], "verify_lens": [0]}
    with FakePageServer(engine={"acceptance": acceptance, "speculation": "not running because it is off"}) as server:
        server.reply = [(0, [" one"]), (0, [" two"])]
        browser.open(server.url)
        browser.wait_text("#speculation", "it is off")
        assert browser.text("#length-now") == "–"
        ask(browser, "hello")
        assert browser.count(".reply .token.own") == 2
        assert not browser.is_shown(".rounds")


@needs_browser
def test_the_accepted_length_of_a_running_reply_is_live(browser, server):
    server.reply = LONG
    browser.open(server.url)
    browser.wait_text("#running", "2")
    ask(browser, "slow", ".round + .round + .round")
    browser.wait_text("#length-note", "of this reply; 3.34 since the start")
    browser.press("Escape")
    browser.wait_text("#length-note", "since the start (95 %")


@needs_browser
def test_on_a_phone_the_dialogue_comes_first_and_nothing_hangs_over(browser, server):
    browser.resize(360, 740)
    shown(browser, server)
    assert not browser.is_shown("#positions")
    assert browser.text("#brief") == "2 running · 1 waiting · length 3.34"
    assert browser.run("return document.documentElement.scrollWidth") == 360
    browser.click("#panel-details summary")
    assert browser.is_shown("#positions")
    browser.click("#show-settings")
    assert browser.run("return document.documentElement.scrollWidth") == 360
    browser.resize(1280, 900)
    browser.wait("document.querySelector('#positions').checkVisibility()")


CONTRAST = """
const luminance = (color) => {
  const parts = color.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255);
  const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (e) => {
  const color = getComputedStyle(e).backgroundColor;
  return color === "rgba(0, 0, 0, 0)" && e.parentElement ? ground(e.parentElement) : color;
};
return [...document.querySelectorAll("p, span, button, label, small, dt, dd, h1, h2, output")]
  .filter((e) => e.checkVisibility() && e.textContent.trim())
  .map((e) => {
    const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.className || e.id || e.tagName];
  })
  .sort((a, b) => a[0] - b[0])[0];
"""


@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_stands_out_from_its_ground(browser, server, theme):
    shown(browser, server)
    for _ in range(["auto", "light", "dark"].index(theme)):
        browser.click("#theme")
    assert browser.text("#theme-name") == theme
    browser.click("#show-settings")
    lowest, where = browser.run(CONTRAST)
    assert lowest >= 4.5, where
    is_dark = browser.run("return getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 249)"
    assert is_dark == (theme == "dark")


@needs_browser
def test_everything_can_be_reached_and_has_a_name(browser, server):
    browser.open(server.url)
    browser.click("#show-settings")
    nameless = browser.run(
        "return [...document.querySelectorAll('button, input, textarea')].filter(e =>"
        " !(e.textContent.trim() || e.labels?.length || e.getAttribute('aria-label'))).map(e => e.id)"
    )
    assert nameless == []
    assert browser.run("return document.activeElement.id") == "show-settings"


def test_no_file_of_the_page_reaches_outside_or_makes_markup_of_text():
    files = {file.name: file.read_text(encoding="utf-8") for file in PAGE.iterdir()}
    assert set(files) >= {"index.html", "page.css", "page.js", "icon.svg"}
    for name, text in files.items():
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
    assert not re.search(r"\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)|<style", files["index.html"])
