"""The page in a real browser: Debian's chromium, driven by playwright."""

import os
import shutil

import numpy as np
import pytest
from playwright.sync_api import expect, sync_playwright

from maxdiffusion.runtime.video import write_video
from tests.serving.stand_in import listening

pytestmark = pytest.mark.slow
REQUIRED = "CI"  # set by continuous integration
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
KEY = "anna-key-0123456789"
ATTACK = "<img src=x onerror=\"document.title='owned'\">"
WHOLE_VIDEO = 4  # HTMLMediaElement.HAVE_ENOUGH_DATA
SHIFTS = """() => new Promise((resolve) => {
  let total = 0;
  new PerformanceObserver((list) => list.getEntries().forEach((entry) => {
    if (!entry.hadRecentInput) total += entry.value;
  })).observe({ type: 'layout-shift', buffered: true });
  setTimeout(() => resolve(total), 200);
})"""


@pytest.fixture(scope="module")
def browser():
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        assert REQUIRED not in os.environ, "apt-get install chromium-headless-shell"
        pytest.skip("NO BROWSER: the page was not tested; apt-get install chromium-headless-shell")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    """A page whose errors, of scripts and of the CSP, fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    opened = context.new_page()
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    yield opened
    context.close()
    assert [text for text in errors if "status of 4" not in text] == []


def test_a_video_is_made_watched_compared_and_deleted(page, tmp_path):
    with listening(tmp_path, step_seconds=0.05) as (_, address):
        page.goto(address)
        expect(page.locator("#ready")).to_have_text("ready")
        page.fill("#prompt", ATTACK)
        page.keyboard.press("Control+Enter")
        bar = page.locator(".job progress")
        expect(bar).to_have_count(1)
        first = float(bar.evaluate("bar => bar.value"))
        expect(bar).not_to_have_js_property("value", first)
        expect(page.locator(".job .stage")).to_contain_text("of 20")
        expect(page.locator("#videos .video")).to_have_count(1)
        assert page.title() == "maxdiffusion"  # the prompt is text, not markup
        assert page.evaluate(SHIFTS) < 0.1

        page.click("#videos .video")
        expect(page.locator("#detail-title")).to_have_text(ATTACK)
        expect(page.locator("#detail-video")).to_have_js_property("readyState", WHOLE_VIDEO)
        page.click("#next")
        expect(page.locator("#videos .video")).to_have_count(2)
        expect(page.locator("#videos .video small").first).to_contain_text("seed 1")

        page.click("#videos .video >> nth=0")
        page.click("#compare-this")
        page.click("#videos .video >> nth=1")
        expect(page.locator("#compare")).to_be_visible()
        expect(page.locator("#differences")).to_contain_text("seed")
        page.keyboard.press("Escape")

        page.fill("#search", "seed 1")
        page.click("#videos .video >> nth=0")
        page.click("#delete")
        page.fill("#search", "")
        expect(page.locator("#videos .video")).to_have_count(1)
        page.reload()
        expect(page.locator("#prompt")).to_have_value(ATTACK)
        expect(page.locator("#videos .video")).to_have_count(1)


FOUR_STEP = {"denoising_step_list": [1000, 750, 500, 250], "scheduler": "euler", "lora_ink": 0.5}


def test_presets_adapters_files_and_other_sizes_are_in_the_form(page, tmp_path):
    presets = {"four_step": FOUR_STEP, "full": {"num_inference_steps": 30, "lora_ink": 0.0}}
    settings = {"serve_presets": presets, "serve_other_sizes": "compile"}
    clip = tmp_path / "clip.mp4"
    write_video(clip, np.zeros((9, 32, 48, 3), np.uint8), fps=8)
    with listening(tmp_path, adapters=("ink",), step_seconds=0.02, **settings) as (server, address):
        page.goto(address)
        four = page.locator("#presets button", has_text="Four step")
        four.click()
        expect(four).to_have_attribute("aria-pressed", "true")
        page.locator("#more summary").click()
        expect(page.locator("#field-lora_ink")).to_have_value("0.5")
        expect(page.locator("#field-num_inference_steps")).to_have_value("4")
        page.fill("#field-lora_ink", "0.25")
        expect(four).to_have_attribute("aria-pressed", "false")
        four.click()
        page.select_option("#size", "other")
        page.fill("#other-width", "128")
        page.set_input_files("#file-input_video", clip)
        page.fill("#prompt", "ink on paper")
        page.click("button.primary")
        expect(page.locator("#videos .video")).to_have_count(1)
        fields = server.store.completed()[0].fields
        assert (fields["width"], fields["lora_ink"], fields["scheduler"]) == (128, 0.5, "euler")
        assert fields["denoising_step_list"] == [1000, 750, 500, 250]
        assert fields["input_video"].endswith(".mp4")
        page.click("#videos .video")
        page.click("#next")  # with the same file, which only the server has
        expect(page.locator("#videos .video")).to_have_count(2)
        assert server.store.completed()[1].fields == fields | {"seed": fields["seed"] + 1}


def test_a_job_that_waits_for_its_programs_says_so(page, tmp_path):
    with listening(tmp_path, step_seconds=0.5) as (server, address):
        page.goto(address)
        for prompt in ("one", "two"):
            page.fill("#prompt", prompt)
            page.click("button.primary")
        expect(page.locator(".job")).to_have_count(2)
        identifier = page.locator(".job").nth(1).get_attribute("data-id")
        server.queue.hold(identifier, "Programs for 128x64x9 are being compiled.")
        expect(page.locator(".job .stage").nth(1)).to_have_text(
            "Programs for 128x64x9 are being compiled."
        )


def test_a_waiting_video_is_cancelled(page, tmp_path):
    with listening(tmp_path, step_seconds=0.3) as (_, address):
        page.goto(address)
        page.fill("#prompt", "one")
        page.click("button.primary")
        page.fill("#prompt", "two")
        page.click("button.primary")
        expect(page.locator(".job")).to_have_count(2)
        page.click(".job:nth-child(2) button")
        expect(page.locator(".job")).to_have_count(1)
        expect(page.locator("#videos .failed")).to_have_text("cancelled")


def test_a_refused_request_says_why(page, tmp_path):
    with listening(tmp_path, serve_max_queue=1, step_seconds=0.5) as (_, address):
        page.goto(address)
        for _ in range(2):
            page.fill("#prompt", "x")
            page.click("button.primary")
        expect(page.locator("#problem")).to_contain_text("wait or run already")
        page.context.clear_cookies()


def test_the_form_opens_when_the_server_has_said_what_it_offers(page, tmp_path):
    with listening(tmp_path) as (_, address):
        held = []
        page.route("**/v1/server", lambda asked: held.append(asked))
        page.goto(address)
        expect(page.locator("#prompt")).to_be_disabled()
        page.wait_for_timeout(50)  # keys that are pressed now reach nothing
        page.keyboard.type("too early")
        [asked] = held
        asked.continue_()
        expect(page.locator("#prompt")).to_be_enabled()
        page.fill("#prompt", "in time")
        expect(page.locator("#prompt")).to_have_value("in time")


def test_the_page_asks_for_a_key(page, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"anna:{KEY}")
    with listening(tmp_path, serve_keys_file=str(keys)) as (_, address):
        page.goto(address)
        expect(page.locator("#login")).to_be_visible()
        page.fill("#key", "a wrong key that is long")
        page.keyboard.press("Enter")
        expect(page.locator("#login-problem")).to_contain_text("not valid")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#ready")).to_have_text("ready")
        assert page.evaluate("document.cookie") == ""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_screens_do_not_scroll_sideways(browser, tmp_path, scheme):
    with listening(tmp_path) as (_, address):
        context = browser.new_context(viewport={"width": 360, "height": 740}, color_scheme=scheme)
        page = context.new_page()
        page.goto(address)
        expect(page.locator("#ready")).to_have_text("ready")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (colour == "rgb(18, 21, 27)") == (scheme == "dark")
        context.close()
