"""The kit itself: a real API server that does what the other tests of this folder take for granted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import watch
from kubernetes.aio.client import ApiException, AuthenticationV1Api, CoreV1Api

from tests.cluster.kube import ISSUER, Kube
from tests.real.node import until

pytestmark = pytest.mark.cluster

DEFINITION = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: naps.tests.hibernode.dev}
spec:
  group: tests.hibernode.dev
  scope: Namespaced
  names: {kind: Nap, plural: naps, singular: nap}
  versions:
  - name: v1
    served: true
    storage: true
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            default: {}
            properties:
              minutes: {type: integer, minimum: 1, default: 20}
          status:
            type: object
            properties:
              phase: {type: string, enum: [Asleep, Awake]}
"""
NAPS = "/apis/tests.hibernode.dev/v1/namespaces/{}/naps"
READ_PODS = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def configmaps(namespace: str) -> str:
    """Name the path of a namespace's config maps."""
    return f"/api/v1/namespaces/{namespace}/configmaps"


def pod(name: str) -> dict[str, object]:
    """Make a small pod."""
    return {"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "none"}]}}


def test_the_server_is_up(kube):
    """It is ready, it is a real one, and its memory can be told."""
    assert kube.request("GET", "/version").body["gitVersion"].startswith("v1.")
    assert 50 * 2**20 < kube.resident() < 2**30


def test_an_unbound_service_account_may_do_nothing(kube, namespace):
    """Its token is good, so the answer is 403 and names it."""
    token = kube.account(namespace, "stranger")
    answer = kube.request("GET", f"/api/v1/namespaces/{namespace}/pods", token=token)
    assert answer.status == 403
    assert f"system:serviceaccount:{namespace}:stranger" in answer.body["message"]


def test_a_bound_service_account_may_do_what_its_role_says_and_no_more(kube, namespace):
    """Reading is allowed in the one namespace; writing is not, and other namespaces are not."""
    token = kube.account(namespace, "reader")
    kube.bind(namespace, "reader", READ_PODS)
    pods = f"/api/v1/namespaces/{namespace}/pods"
    until("access", lambda: kube.request("GET", pods, token=token).status == 200)
    assert kube.request("POST", pods, pod("p"), token=token).status == 403
    assert kube.request("GET", "/api/v1/namespaces/default/pods", token=token).status == 403


def test_a_wrong_token_is_nobody(kube):
    """A token that the server did not sign is refused with 401."""
    assert kube.request("GET", "/api/v1/pods", token="e30.e30.e30").status == 401


async def test_the_client_works_with_a_token(kube, namespace):
    """The official client, as a service account: a list that is allowed, a deletion that is not."""
    kube.make(f"/api/v1/namespaces/{namespace}/pods", pod("p"))
    token = kube.account(namespace, "reader")
    kube.bind(namespace, "reader", READ_PODS)
    path = f"/api/v1/namespaces/{namespace}/pods"
    until("access", lambda: kube.request("GET", path, token=token).status == 200)
    async with kube.client(token) as client:
        pods = await CoreV1Api(client).list_namespaced_pod(namespace)
        assert [item.metadata.name for item in pods.items] == ["p"]
        with pytest.raises(ApiException) as caught:
            await CoreV1Api(client).delete_namespaced_pod("p", namespace)
        assert caught.value.status == 403


async def test_token_review_tells_whose_a_token_is(kube, namespace):
    """A reviewer with the role for it learns the account of a good token, and that a bad one is bad."""
    reviewer = kube.account(namespace, "reviewer")
    worker = kube.account(namespace, "worker")
    path = "/apis/authentication.k8s.io/v1/tokenreviews"
    review = {"spec": {"token": worker, "audiences": [ISSUER]}}
    assert kube.request("POST", path, review, token=reviewer).status == 403
    kube.bind(namespace, "reviewer", "system:auth-delegator")
    until("access", lambda: kube.request("POST", path, review, token=reviewer).status == 201)
    async with kube.client(reviewer) as client:
        api = AuthenticationV1Api(client)
        good = await api.create_token_review(review)
        assert good.status.authenticated
        assert good.status.user.username == f"system:serviceaccount:{namespace}:worker"
        bad = await api.create_token_review({"spec": {"token": worker[:-4]}})
        assert not bad.status.authenticated


def test_a_server_that_was_stopped_and_started_keeps_its_data(kube, namespace):
    """While it is away nobody answers; afterwards objects and tokens are as before."""
    made = kube.make(configmaps(namespace), {"metadata": {"name": "kept"}, "data": {"a": "b"}})
    token = kube.account(namespace, "reader")
    kube.stop_api()
    with pytest.raises(OSError, match="refused"):
        kube.request("GET", "/version")
    kube.start_api()
    answer = kube.request("GET", f"{configmaps(namespace)}/kept")
    assert (answer.body["data"], answer.version) == ({"a": "b"}, made.version)
    assert kube.request("GET", "/api/v1/pods", token=token).status == 403


def test_a_frozen_server_takes_connections_and_says_nothing_until_it_thaws(kube):
    """The other kind of outage: no error at once, an answer late."""
    with kube.api_frozen(), pytest.raises(OSError, match="timed out"):
        kube.request("GET", "/version", seconds=0.2)
    assert kube.request("GET", "/version").status == 200


def test_a_definition_is_applied_and_can_be_used(kube, namespace, tmp_path):
    """Twice changes nothing; defaults, bounds and the status subresource are the server's."""
    file = tmp_path / "crd.yaml"
    file.write_text(DEFINITION)
    name = ["customresourcedefinition.apiextensions.k8s.io/naps.tests.hibernode.dev"]
    assert kube.apply(file) == kube.apply(file) == name
    naps = NAPS.format(namespace)
    made = kube.make(naps, nap("a", status={"phase": "Asleep"}))
    assert made.body["spec"] == {"minutes": 20}
    assert "status" not in made.body
    assert kube.request("POST", naps, nap("b", spec={"minutes": 0})).status == 422
    patched = kube.request(
        "PATCH",
        f"{naps}/a/status",
        {"status": {"phase": "Awake"}},
        content_type="application/merge-patch+json",
    )
    assert patched.body["status"] == {"phase": "Awake"}
    assert kube.request("PUT", f"{naps}/a", made.body).status == 409


def nap(name: str, **fields: object) -> dict[str, object]:
    """Make an object of the definition above."""
    return {"apiVersion": "tests.hibernode.dev/v1", "kind": "Nap", "metadata": {"name": name}, **fields}


def test_a_dry_run_checks_and_stores_nothing(kube, namespace, tmp_path):
    """The server says what it would do; what it would refuse fails."""
    file = tmp_path / "map.json"
    content = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "dry", "namespace": namespace}}
    file.write_text(json.dumps(content))
    assert kube.apply(file, dry_run=True) == ["configmap/dry"]
    assert kube.request("GET", f"{configmaps(namespace)}/dry").status == 404
    file.write_text(json.dumps(content | {"data": {"key with spaces": "x"}}))
    with pytest.raises(AssertionError, match="key with spaces"):
        kube.apply(file, dry_run=True)


async def test_a_watch_that_waited_too_long_is_told_410(kube, namespace):
    """A version from before the server's start cannot be watched from; a new list can."""
    version = kube.make(configmaps(namespace), {"metadata": {"name": "old"}}).version
    kube.expire()
    async with kube.client() as client:
        api = CoreV1Api(client)

        async def events(since: str) -> list[str]:
            stream = watch.Watch().stream(
                api.list_namespaced_config_map, namespace, resource_version=since, timeout_seconds=1
            )
            return [event["type"] async for event in stream]

        with pytest.raises(ApiException) as caught:
            await events(version)
        assert caught.value.status == 410
        fresh = await api.list_namespaced_config_map(namespace)
        assert [item.metadata.name for item in fresh.items] == ["old"]
        assert await events(fresh.metadata.resource_version) == []


def test_a_list_that_waited_too_long_cannot_be_continued(kube, namespace):
    """After a compaction the rest of a paginated list is answered with 410."""
    for number in range(3):
        kube.make(configmaps(namespace), {"metadata": {"name": f"m{number}"}})
    first = kube.request("GET", f"{configmaps(namespace)}?limit=1")
    following = f"{configmaps(namespace)}?limit=1&continue={first.body['metadata']['continue']}"
    assert kube.request("GET", following).status == 200
    kube.compact()
    kube.compact()
    assert kube.request("GET", following).status == 410


def test_a_kustomization_is_built_and_applied(kube, namespace, tmp_path):
    """A directory with base and component comes out as one stream, and apply takes the directory."""
    (tmp_path / "base").mkdir()
    (tmp_path / "labels").mkdir()
    (tmp_path / "base" / "kustomization.yaml").write_text("resources: [map.yaml]\n")
    (tmp_path / "base" / "map.yaml").write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: built}\n")
    (tmp_path / "labels" / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\nlabels: [{pairs: {app: hibernode}}]\n"
    )
    (tmp_path / "kustomization.yaml").write_text(
        f"namespace: {namespace}\nresources: [base]\ncomponents: [labels]\n"
    )
    assert f"namespace: {namespace}" in kube.kubectl("kustomize", tmp_path).stdout
    assert kube.apply(tmp_path) == ["configmap/built"]
    built = kube.request("GET", f"{configmaps(namespace)}/built").body
    assert built["metadata"]["labels"] == {"app": "hibernode"}


def test_a_job_gets_a_pod_and_both_go_with_their_namespace(kube, controllers, namespace):
    """With a controller manager a Job makes its pod, and a deleted namespace is emptied and goes."""
    container = {"name": "main", "image": "none"}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    job = {"metadata": {"name": "j"}, "spec": {"template": template}}
    kube.make(f"/apis/batch/v1/namespaces/{namespace}/jobs", job)

    def pods() -> Any:
        return kube.request("GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector=job-name=j").body[
            "items"
        ]

    until("pod of the job", pods)
    kube.request("DELETE", f"/api/v1/namespaces/{namespace}")
    until("end", lambda: kube.request("GET", f"/api/v1/namespaces/{namespace}").status == 404, 120)


def test_the_kit_ends_what_it_started(tmp_path):
    """A second server beside the first starts, answers and is gone after close."""
    second = Kube(tmp_path / "second")
    pids = (second.etcd.pid, second.api.pid)
    try:
        assert second.answers(f"{second.url}/readyz")
    finally:
        second.close()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
