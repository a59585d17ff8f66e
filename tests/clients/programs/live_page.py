"""The live page in Chromium: streams that move, a worker that is killed, other origins, accessibility, 600 pods."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, sync_playwright

URL, ADMIN_URL = os.environ["SEGUE_LIVE_URL"], os.environ["SEGUE_ADMIN_URL"]
PRINTED_URL = os.environ["SEGUE_PRINTED_URL"]  # by `segue up`, with the token
SHOTS, AXE = Path(os.environ["SEGUE_SHOTS"]), Path(os.environ["SEGUE_AXE"]).read_text(encoding="utf-8")
PROMPT = "Tell me a story about two rivers."
WAIT_MS = 120_000
FAKE_PODS, FRAMES_SECONDS = 600, 8
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


def open_page(browser: Browser, url: str, requested: set[str], scheme: str = "light") -> Page:
    """A tab at this URL; `requested` is added where it asks. An error of the page's script is raised."""
    page = browser.new_context(viewport={"width": 1280, "height": 740}, color_scheme=scheme).new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("request", lambda request: requested.add(urlsplit(request.url).netloc))

    def failed(error: object) -> None:
        raise AssertionError(f"the page has failed: {error}")

    page.on("pageerror", failed)
    page.goto(url)
    page.wait_for_selector("#link.on")
    seen(page, "pods.size > 1")
    return page


def seen(page: Page, what: str) -> None:
    """Wait until an expression is true. Playwright's own way needs `unsafe-eval`, which the page does not allow."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(what):
        assert time.monotonic() < deadline, f"it never came to {what}: {page.text_content('#ticker')}"
        page.wait_for_timeout(50)


def shoot(page: Page, name: str) -> None:
    """A screenshot, small enough for the documentation."""
    session = page.context.new_cdp_session(page)
    taken = session.send("Page.captureScreenshot", {"format": "webp", "quality": 80})
    (SHOTS / f"live-{name}.webp").write_bytes(base64.b64decode(taken["data"]))
    session.detach()


def migrated() -> int:
    """What the router has counted."""
    with urllib.request.urlopen(f"{ADMIN_URL}/metrics") as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("segue_migrations_total{")]
    return sum(int(float(line.split()[-1])) for line in lines if 'outcome="migrated"' in line)


def chat(page: Page) -> Callable[[], str]:
    """Ask; what is returned waits for the answer's end and gives its text."""
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")

    def text() -> str:
        page.wait_for_selector(".say.bot[data-done]")
        return str(
            page.evaluate(
                """() => [...document.querySelector(".words").childNodes]
                    .filter(node => node.nodeType === Node.TEXT_NODE).map(node => node.data).join("")"""
            )
        )

    return text


def quiet(page: Page) -> None:
    """Wait until no request runs."""
    seen(
        page,
        "document.getElementById('f-streams').textContent === '0'"
        " && document.getElementById('f-waiting').textContent === '0' && ![...dots.values()].some(d => !d.ending)",
    )


def drained(page: Page, pid: int) -> dict[str, Any]:
    """decode-1 drains under load: its streams are seen to move, as many as the router counts."""
    before = migrated()
    page.click("#many")
    seen(page, "pods.get('decode-1').requests >= 2 && dots.size >= 5")
    os.kill(pid, signal.SIGTERM)
    seen(page, "moves.migrated >= 1")
    page.wait_for_timeout(350)
    shoot(page, "dark")
    seen(
        page,
        "[...document.querySelectorAll('#ticker li')].some(l => l.textContent.includes('decode-1 has joined'))",
    )
    quiet(page)
    page.wait_for_timeout(1500)  # the last events are in a batch
    return {
        "moved": page.evaluate("moves.migrated"),
        "counted": migrated() - before,
        "shown": page.text_content("#f-saved"),
        "ticker": page.text_content("#ticker"),
    }


def without_token(browser: Browser, requested: set[str]) -> dict[str, Any]:
    """What one sees who opens the address that everybody knows; and what one who has opened the printed one, again."""
    page = open_page(browser, URL, requested)
    found = {"kill": page.locator(".kill").count(), "said": page.text_content("#quiet")}
    page.close()
    printed = open_page(browser, PRINTED_URL, requested)
    found["left"] = urlsplit(printed.url).fragment
    printed.reload()
    seen(printed, "pods.size > 1")
    found["again"] = printed.locator(".kill").count()
    printed.close()
    return found


def killed(page: Page, undisturbed: str) -> dict[str, Any]:
    """The worker that writes an answer is killed by its button; the answer's text goes on."""
    page.click("#many")
    seen(page, "dots.size >= 4")
    answer = chat(page)
    seen(page, "document.querySelector('.words')?.textContent.length > 200")
    pod = page.evaluate("[...dots.values()].find(dot => own.has(dot.id)).pod")
    page.click(f"[aria-label='Kill {pod}']", force=True)
    page.wait_for_selector(".seam.continued")
    page.mouse.move(5, 5)
    page.wait_for_timeout(900)
    shoot(page, "light")
    text = answer()
    page.click(".way button")
    page.wait_for_selector(".visit")
    visits = page.locator(".visit").all_text_contents()
    page.press("body", "Escape")
    seam = page.text_content(".seam.continued")  # before it the stream may have moved
    return {"pod": pod, "same": text == undisturbed, "length": len(text), "seam": seam, "visits": visits}


def faults(page: Page) -> list[str]:
    """What axe-core finds on the page as it is."""
    page.evaluate(AXE)
    found = page.evaluate("tags => axe.run(document, {runOnly: tags})", TAGS)
    return [
        f"{fault['id']}: {node['html'][:120]}" for fault in found["violations"] for node in fault["nodes"]
    ]


def by_keyboard(page: Page) -> dict[str, Any]:
    """A pod's requests, opened and closed without a mouse; the table as text."""
    page.locator("#l-decode .open").first.focus()
    page.keyboard.press("Enter")
    opened = page.text_content("#h-detail")
    found = faults(page)
    page.keyboard.press("Escape")
    closed = page.is_hidden("#detail")
    page.locator("#as-table").focus()
    page.keyboard.press("Enter")
    found += faults(page)
    rows = page.locator("#rows tr th").all_text_contents()
    page.keyboard.press("Enter")
    return {"opened": opened, "closed": closed, "rows": sorted(rows), "faults": found}


# ---- a server of 600 pods that only the page sees --------------------------------------------------------------------


class FakeFleet(BaseHTTPRequestHandler):
    """The real page, and events of pods that are made up; 100 a second."""

    protocol_version = "HTTP/1.1"
    page, policy = b"", ""

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """The page, or its events until it is closed."""
        self.send_response(200)
        if self.path != "/live/events":
            self.send_header("Content-Type", "text/html; charset=utf-8")
            if self.policy:
                self.send_header("Content-Security-Policy", self.policy)
            self.send_header("Content-Length", str(len(self.page)))
            self.end_headers()
            self.wfile.write(self.page)
            return
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for second in range(3600):
                self._tell(second)
        except OSError:
            return

    def _tell(self, second: int) -> None:
        pods = [fake_pod(number, second) for number in range(FAKE_PODS)]
        names = [pod["name"] for pod in pods if pod["role"] == "decode"]
        listed = [
            [f"id{n:010}", "decoding", names[(n * 7) % len(names)], 900, second, 5.0] for n in range(256)
        ]
        self._event("fleet", {"router": "r", "routers": [], "pods": pods, "totals": fake_totals(second)})
        self._event("flow", [])
        self._event("requests", {"list": listed, "unlisted": 9744})
        pace = threading.Event()
        for number in range(100):
            at = (second * 100 + number) % 256
            pod = names[(at * 7 + number * 13) % len(names)]
            self._event("request", {"id": f"id{at:010}", "state": "decoding", "pod": pod})
            pace.wait(0.01)

    def _event(self, kind: str, data: object) -> None:
        self.wfile.write(f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode())


def fake_pod(number: int, second: int) -> dict[str, Any]:
    role, load = ("prefill" if number % 4 == 0 else "decode"), (number * 37 + second * 11) % 64
    state = "draining" if number % 97 == 5 else "silent" if number % 211 == 9 else "ready"
    pages, requests = [load * 12, 4, 768], load // 2
    return {
        "name": f"{role}-{number}",
        "role": role,
        "state": state,
        "group": 0,
        "slots": [load, 64],
        "pages": pages,
        "queued_tokens": load * 100,
        "requests": requests,
        "step_ms": 9.5,
        "tokens_per_second": load * 20,
    }


def fake_totals(second: int) -> dict[str, Any]:
    states = {"waiting": 31, "prefilling": 140, "extending": 0, "ready": 12, "decoding": 9800}
    figures = {"tokens_per_second": 310_000 + second, "ended": 5, "rejected": 0, "errors": 0, "migrated": 41}
    return {**figures, "continued": 3, "ttft_ms": 412.0, "token_ms": 21.5, "states": states}


def serve(handler: type[BaseHTTPRequestHandler]) -> str:
    """Serve in this process; its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


def seconds_of(session: Any) -> float:
    """CPU seconds of the page's main thread so far: those in which other programs had the core do not count."""
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def many_pods(browser: Browser) -> dict[str, Any]:
    """CPU of the page's main thread for each frame that it draws of 600 pods, with 100 events a second."""
    with urllib.request.urlopen(urllib.request.Request(ADMIN_URL, headers={"Accept": "text/html"})) as answer:
        FakeFleet.page, FakeFleet.policy = answer.read(), answer.headers["content-security-policy"]
    page = open_page(browser, serve(FakeFleet), set())
    page.wait_for_selector("#heat:not([hidden])")
    page.evaluate("window.drawn = 0; const own_frame = frame; frame = now => { drawn += 1; own_frame(now); }")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.wait_for_timeout(1000)
    began_at, frames = seconds_of(session), page.evaluate("drawn")
    page.wait_for_timeout(1000 * FRAMES_SECONDS)
    spent, drawn = seconds_of(session) - began_at, page.evaluate("drawn") - frames
    shoot(page, "heat")
    page.focus("#heat")
    for key in ("ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    told = {"said": page.text_content("#heat-said"), "opened": page.text_content("#h-detail")}
    return {"frames": drawn, "ms_a_frame": 1000 * spent / max(1, drawn), "faults": faults(page), **told}


class EmptyPage(FakeFleet):
    """A page of another origin."""

    page = b"<!doctype html><title>other</title>"


FOREIGN = """async ([url, token]) => {
    const tried = {};
    const ask = async (name, path, options) => {
        try {
            const answer = await fetch(url + path, {signal: AbortSignal.timeout(3000), ...options});
            tried[name] = [answer.type, answer.status, answer.ok ? await answer.text() : ""];
        } catch (error) { tried[name] = error.name; }
    };
    await ask("events", "/live/events");
    await ask("unseen", "/live/events", {mode: "no-cors"});
    await ask("page", "/", {headers: {Accept: "text/html"}});
    await ask("kill", "/live/kill", {method: "POST", headers: {"Content-Type": "application/json",
        "X-Segue-Live-Token": token}, body: '{"worker": "decode-0"}'});
    return tried;
}"""


def of_another_origin(browser: Browser) -> dict[str, Any]:
    """What a page at another port of this machine gets, although the API lets it chat, and it had the token."""
    page = browser.new_page()
    page.goto(serve(EmptyPage))
    found: dict[str, Any] = page.evaluate(FOREIGN, [URL, urlsplit(PRINTED_URL).fragment])
    return found


def main() -> None:
    requested: set[str] = set()
    told: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["SEGUE_CHROMIUM"], args=["--no-sandbox"], headless=True
        )
        told["foreign"] = of_another_origin(browser)
        told["stranger"] = without_token(browser, requested)
        dark = open_page(browser, PRINTED_URL, requested, "dark")
        told["dark"] = faults(dark)
        told["drained"] = drained(dark, int(os.environ["SEGUE_DRAIN_PID"]))
        dark.close()
        first = open_page(browser, PRINTED_URL, requested)
        undisturbed = chat(first)()
        told["keyboard"] = by_keyboard(first)
        first.close()
        second = open_page(browser, PRINTED_URL, requested)
        told["killed"] = killed(second, undisturbed)
        told["light"] = faults(second)
        second.close()
        admin = open_page(browser, ADMIN_URL, requested)
        told["admin"] = {"chat": admin.is_visible("#chat"), "kill": admin.locator(".kill").count()}
        admin.close()
        told["many"] = many_pods(browser)
        browser.close()
    told["hosts"] = sorted(requested)
    sys.stdout.write(json.dumps(told) + "\n")


main()
