"""`segue up --tls-cert --tls-key`: sixteen streams of a real deployment while their certificate is replaced."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest

from tests.certificates import pem_pair, write_pair
from tests.integration.conftest import SMALL
from tests.integration.deployments.deployment import LocalDeployment, deployment
from tests.integration.deployments.streams import StreamedAnswer, complete
from tests.waiting import until

STREAMS, TOKENS = 16, 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    write_pair(folder, *pem_pair())
    return folder


@pytest.fixture(scope="module")
def over_tls(folder: Path) -> Iterator[LocalDeployment]:
    flags = ("--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key"))
    with deployment(*flags, config=SMALL) as running:
        yield running


def shown(running: LocalDeployment) -> str:
    """The certificate that a new connection is shown."""
    return "".join(ssl.get_server_certificate(("127.0.0.1", running.router_port)).split())


def unread(running: LocalDeployment) -> float:
    return running.total("router", "segue_tls_certificate_unread_total")


async def answers_while(
    running: LocalDeployment, folder: Path, new: tuple[bytes, bytes]
) -> list[StreamedAnswer]:
    """Streams of clients that trust the first certificate; the files are replaced when all have begun."""
    trusted = ssl.create_default_context(cafile=str(folder / "tls.crt"))
    begun = asyncio.Semaphore(0)
    url = f"https://127.0.0.1:{running.router_port}/v1"
    limits = httpx2.Limits(max_connections=STREAMS)
    async with (
        httpx2.AsyncClient(verify=trusted, limits=limits, timeout=180) as http,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client,
    ):
        greedy = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
        streams = [
            asyncio.create_task(complete(client, "Once upon a time", begun.release, **greedy))
            for _ in range(STREAMS)
        ]
        for _ in streams:
            await begun.acquire()
        write_pair(folder, *new)
        replaced = "".join(new[0].decode().split())
        await asyncio.to_thread(until, lambda: shown(running) == replaced, 10, "the new certificate")
        assert not any(stream.done() for stream in streams), "too short to see anything"
        return await asyncio.gather(*streams)


@pytest.mark.timeout(300)
def test_sixteen_streams_outlive_their_certificate(over_tls: LocalDeployment, folder: Path) -> None:
    answers = asyncio.run(answers_while(over_tls, folder, pem_pair()))
    assert [answer.completion_tokens for answer in answers] == [TOKENS] * STREAMS
    assert len({answer.text for answer in answers}) == 1
    assert unread(over_tls) == 0


def test_a_broken_certificate_is_said_and_the_old_one_stays(over_tls: LocalDeployment, folder: Path) -> None:
    before = shown(over_tls)
    write_pair(folder, pem_pair()[0], pem_pair()[1])
    until(lambda: unread(over_tls) > 0, 10, "the count")
    assert shown(over_tls) == before
    over_tls.command.line(lambda line: "tls.certificate_unread" in line, 10)
    good = pem_pair()
    write_pair(folder, *good)
    until(lambda: shown(over_tls) == "".join(good[0].decode().split()), 10, "the next certificate")


def test_probes_are_plain_and_the_console_names_https(over_tls: LocalDeployment) -> None:
    assert httpx2.get(f"{over_tls.admin_url}/readyz").status_code == 200
    served = next(line for line in over_tls.command.lines if "is served at" in line)
    assert f"https://127.0.0.1:{over_tls.router_port}/v1" in served
