"""TokenReview over real HTTP, against a server in this process that answers as the API server does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration

from hibernode.errors import UnavailableError
from hibernode.kube.api import KubeApi
from hibernode.metadata.access import Reviewed
from hibernode.metadata.records import PodRef
from hibernode.metadata.token_review import PATH, KubeReviewer
from tests.unit.service_kit import CODE, P2P, publication, refused, serving

UID = "aaaaaaaa-0000-4000-8000-00000000000a"


class Cluster:
    """Knows one token; ``code`` other than 201 is an outage or a refusal."""

    def __init__(self) -> None:
        self.code, self.asked = 201, 0
        self.bodies: list[Any] = []

    async def review(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = await request.json()
        self.bodies.append(body)
        if self.code != 201:
            return web.json_response({"kind": "Status", "code": self.code, "message": "no"}, status=self.code)
        good = body["spec"]["token"] == "good"
        extra = {
            "authentication.kubernetes.io/pod-name": ["p"],
            "authentication.kubernetes.io/pod-uid": [UID],
        }
        user = {"username": "system:serviceaccount:ns:sa", "extra": extra}
        status = {"authenticated": True, "user": user, "audiences": body["spec"].get("audiences", [])}
        answer = {**body, "status": status if good else {"user": {}, "error": "invalid bearer token"}}
        return web.json_response(answer, status=201)


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Cluster, KubeApi]]:
    found, app = Cluster(), web.Application()
    app.router.add_post(PATH, found.review)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    api = KubeApi(Configuration(host=f"http://{host}:{port}"), call_seconds=20, total_seconds=0.5)
    try:
        yield found, api
    finally:
        await api.close()
        await runner.cleanup()


async def test_the_api_server_says_whose_a_token_is() -> None:
    """Account and bound pod of a good one, nothing of a bad one; the audiences are asked for."""
    async with cluster() as (server, api):
        reviewer = KubeReviewer(api, ("mx",))
        assert await reviewer.review("good") == Reviewed(
            "system:serviceaccount:ns:sa", PodRef("p", UID, "ns")
        )
        assert await reviewer.review("bad") is None
        assert server.bodies[0]["kind"] == "TokenReview"
        assert server.bodies[0]["spec"] == {"token": "good", "audiences": ["mx"]}


@pytest.mark.parametrize("code", [403, 404, 500, 503])
async def test_a_review_that_cannot_be_had_is_an_outage_and_no_verdict(code: int) -> None:
    """Nobody is let in, and nobody is told that the token is bad."""
    async with cluster() as (server, api):
        server.code = code
        with pytest.raises(UnavailableError):
            await KubeReviewer(api).review("good")


async def test_many_requests_with_one_token_ask_once() -> None:
    """Also when they come at the same time, and a pod with a good token publishes for itself only."""
    async with (
        cluster() as (server, api),
        serving(reviewer=KubeReviewer(api)) as service,
        service.client(target=service.tcp) as client,
    ):
        calls = [client.call("ListSources", P2P.ListSourcesRequest(), token="good") for _ in range(8)]
        await asyncio.gather(*calls)
        assert server.asked == 1
        mine = publication(pod={"pod_uid": UID, "pod_name": "p", "pod_namespace": "ns"})
        assert (await client.call("PublishMetadata", mine, token="good")).success
        stolen = publication("w1", pod={"pod_uid": "b" * 36})
        assert (await refused(client.call("PublishMetadata", stolen, token="good")))[0] is (
            CODE.PERMISSION_DENIED
        )
        server.code = 503
        listing = client.call("ListSources", P2P.ListSourcesRequest(), token="another")
        assert (await refused(listing))[0] is CODE.UNAVAILABLE
