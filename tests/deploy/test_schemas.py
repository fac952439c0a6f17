"""Kubernetes' own schemas take the manifests. The validator has an environment of its own, which needs a network."""

import json
import subprocess

import pytest

from tests.clients.environment import UnreachableError, make_python
from tests.deploy.manifests import DOCUMENTS, ROOT, Document, pods

VALIDATOR = "kubernetes-validate==1.37.0"
VERSION = "1.37"
CUSTOM = {
    "LeaderWorkerSet",
    "RayService",
    "ScaledObject",
    "ServiceMonitor",
}  # of others: only their pods are known here
SCRIPT = """
import json, sys, kubernetes_validate
for each in json.load(sys.stdin):
    try:
        kubernetes_validate.validate(each, sys.argv[1], strict=True)
        print("ok")
    except kubernetes_validate.ValidationError as error:
        print(error.message)
"""


def objects(document: Document) -> list[dict]:
    """What Kubernetes knows of a document."""
    if document.kind is None:
        return []
    if document.kind not in CUSTOM:
        return [document.content]
    return [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        for template in pods(document)
    ]


@pytest.fixture(scope="module")
def python() -> str:
    try:
        return str(make_python(ROOT / ".cache" / "deploy" / "kubernetes-validate", [VALIDATOR]) / "python")
    except UnreachableError as error:
        pytest.skip(str(error))


@pytest.mark.long
def test_the_schemas_take_every_object(python: str):
    known = [each for document in DOCUMENTS for each in objects(document)]
    wrong = known[0] | {"spec": known[0]["spec"] | {"replica": 2}}
    done = subprocess.run(
        [python, "-I", "-c", SCRIPT, VERSION],
        input=json.dumps([*known, wrong]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *verdicts, last = done.stdout.splitlines()
    assert verdicts == ["ok"] * len(known)
    assert "replica" in last
