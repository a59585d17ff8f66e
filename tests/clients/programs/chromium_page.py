"""Pages in Chromium: an allowed one and one of this machine stream a chat, one of any other origin gets nothing."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import urlsplit

from playwright.sync_api import sync_playwright
from told import BASE_URL, KEY, MODEL, Sums

# Names of the pages, of which the router allows the first by its settings and the second because it is loopback.
ALLOWED, LOCAL, OTHER = "http://app.test:5173/", "http://localhost:5174/", "http://elsewhere.test:5175/"
# All names are this machine. Chromium itself would keep pages of an unknown place from loopback.
FLAGS = [
    "--no-sandbox",
    "--host-resolver-rules=MAP *.test 127.0.0.1",
    "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
]
ASK = """async ([url, key, body]) => {
    const answer = await fetch(url + "/chat/completions", {
        method: "POST",
        headers: {"Content-Type": "application/json", "Authorization": "Bearer " + key},
        body: JSON.stringify(body),
    });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", reads = 0;
    for (;;) {
        const {done, value} = await reader.read();
        if (done) return {status: answer.status, id: answer.headers.get("x-request-id"), text, reads};
        text += value;
        reads += 1;
    }
}"""
BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 48,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class EmptyPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        """Serve a page that has nothing on it."""
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>app</title>")


def serve(url: str) -> None:
    """Serve an empty page at this URL's port."""
    server = HTTPServer(("127.0.0.1", urlsplit(url).port or 80), EmptyPage)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    told = Sums()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["SEGUE_CHROMIUM"], args=FLAGS, headless=True
        )
        page = browser.new_page()
        for url in (ALLOWED, LOCAL):
            serve(url)
            page.goto(url)
            answer = page.evaluate(ASK, [BASE_URL, KEY, BODY])
            assert answer["status"] == 200, answer
            assert answer["id"], answer
            assert answer["reads"] > 1, "the page saw the stream only as a whole"
            assert answer["text"].rstrip().endswith("data: [DONE]"), answer
            told.add(answer["text"].count('"delta":{"content"'))
        serve(OTHER)
        page.goto(OTHER)
        outcome = page.evaluate(
            f"(given) => ({ASK})(given).then(() => 'answered', error => error.name)", [BASE_URL, KEY, BODY]
        )
        assert outcome == "TypeError", outcome  # what a browser says of an answer that it may not show
        browser.close()
    told.write()


main()
