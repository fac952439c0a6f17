"""Each manifest fits jsg's command line and itself; `test_schemas.py` asks the schemas. Nothing needs a cluster."""

import re
import shlex
from typing import Any

import pytest
import yaml

from jsg.config import KEY_VARIABLES, ServerConfig
from jsg.server.http.access import PROBES
from tests.deploy.manifests import DEPLOY, DOCUMENTS, Document, commands, configured, hosted, of_file, of_kind, pods
from tests.deploy.test_docker import TEXT as DOCKERFILE
from tests.deploy.test_docker import only

STARTING = {
    "compose/compose.yaml": 2,
    "kubernetes/deployment.yaml": 1,
    "kubernetes/leaderworkerset.yaml": 2,
    "skypilot/jsg.yaml": 1,
}
"""Files that start `jsg serve`, and how often."""
MIN_START_S = 900
MIN_EXIT_S = 10  # for the last answers and the exit, after the drain

GROUP_SIZE = of_kind("LeaderWorkerSet")[0].content["spec"]["leaderWorkerTemplate"]["size"]
PODS = [
    pytest.param(pod, id=f"{document}-{index}")
    for document in of_kind("Deployment") + of_kind("LeaderWorkerSet")
    for index, pod in enumerate(pods(document))
]


def test_no_command_is_overlooked():
    found = {document.file: len(commands(document)) for document in DOCUMENTS if commands(document)}
    assert found == STARTING


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if commands(each)], ids=str)
def test_the_command_line_takes_every_argument(document: Document):
    for index, arguments in enumerate(commands(document)):
        _, server = configured(hosted(arguments, GROUP_SIZE, index))
        assert server.port == ServerConfig().port or index, "the port that the image exposes"


def container_of(pod: dict[str, Any]) -> dict[str, Any]:
    [container] = pod["spec"]["containers"]
    return container


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container.get("ports", [])}


class TestPods:
    @pytest.mark.parametrize("pod", PODS)
    def test_the_volumes_are_those_of_the_image(self, pod: dict[str, Any]):
        container = container_of(pod)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
        assert [mounts["models"], mounts["cache"]] == yaml.safe_load(only("VOLUME").rest)
        engine, server = configured(hosted(container["args"], GROUP_SIZE, 0))
        assert engine.model_path.startswith(f"{mounts['models']}/")
        assert server.api_key_file is None or server.api_key_file.startswith(f"{mounts['keys']}/")

    @pytest.mark.parametrize("pod", PODS)
    def test_it_runs_as_the_user_of_the_image_and_may_do_nothing_else(self, pod: dict[str, Any]):
        context, own = pod["spec"]["securityContext"], container_of(pod)["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == only("USER", last_stage()).rest
        assert context["fsGroup"] == context["runAsGroup"] and context["runAsNonRoot"]
        assert own == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod["spec"]["automountServiceAccountToken"] is False

    @pytest.mark.parametrize("pod", PODS)
    def test_its_devices_are_those_that_it_asks_for(self, pod: dict[str, Any]):
        container = container_of(pod)
        engine, server = configured(hosted(container["args"], GROUP_SIZE, 0))
        devices = engine.tp_size * server.dp_size // engine.nnodes
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(devices)

    @pytest.mark.parametrize("pod", PODS)
    def test_the_end_fits_into_the_grace(self, pod: dict[str, Any]):
        assert pod["spec"]["terminationGracePeriodSeconds"] >= end_s(container_of(pod)) + MIN_EXIT_S

    @pytest.mark.parametrize("pod", PODS)
    def test_who_serves_takes_requests_until_routers_know(self, pod: dict[str, Any]):
        container = container_of(pod)
        if ports_of(container):
            probe = container["readinessProbe"]
            _, server = configured(hosted(container["args"], GROUP_SIZE, 0))
            assert server.drain_delay >= probe["periodSeconds"] * probe["failureThreshold"]
            assert "lifecycle" not in container, "it would wait twice"

    @pytest.mark.parametrize("pod", PODS)
    def test_who_serves_is_probed_where_no_key_is_needed(self, pod: dict[str, Any]):
        container = container_of(pod)
        probes = {
            name: container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe") if name in container
        }
        if not ports_of(container):
            assert not probes, "a host that follows does not serve"
            return
        paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
        assert paths == {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}
        assert set(paths.values()) == PROBES
        _, server = configured(hosted(container["args"], GROUP_SIZE, 0))
        assert server.host == "0.0.0.0"
        assert {ports_of(container)[probe["httpGet"]["port"]] for probe in probes.values()} == {server.port}
        start = probes["startupProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= MIN_START_S

    def test_hosts_of_a_group_differ_in_nothing_but_their_number(self):
        [group] = of_kind("LeaderWorkerSet")
        leader, worker = (container_of(pod)["args"] for pod in pods(group))
        engines = [configured(hosted(arguments, GROUP_SIZE, 0))[0] for arguments in (leader, worker)]
        assert engines[0] == engines[1]
        assert [configured(hosted(leader, GROUP_SIZE, index))[0].node_rank for index in range(GROUP_SIZE)] == [0, 1]

    def test_workers_outlive_the_answers_of_their_leader(self):
        [group] = of_kind("LeaderWorkerSet")
        leader, worker = (container_of(pod) for pod in pods(group))
        assert end_s(worker) > end_s(leader)


def end_s(container: dict[str, Any]) -> float:
    """How long the end of a pod may take after it is asked for."""
    if not ports_of(container):
        return container["lifecycle"]["preStop"]["sleep"]["seconds"]
    _, server = configured(hosted(container["args"], GROUP_SIZE, 0))
    return server.drain_delay + server.shutdown_timeout


def last_stage() -> str:
    return "FROM" + DOCKERFILE.rpartition("\nFROM")[2]


SERVING = [
    pod
    for document in of_kind("Deployment") + of_kind("LeaderWorkerSet")
    for pod in pods(document)
    if ports_of(container_of(pod))
]


class TestSelectors:
    """Whatever selects pods selects those that serve, and the ports that it names are theirs."""

    def selected(self, labels: dict[str, str]) -> dict[str, Any]:
        [pod] = [pod for pod in SERVING if labels.items() <= pod["metadata"]["labels"].items()]
        return container_of(pod)

    def test_the_deployment(self):
        [deployment] = of_kind("Deployment")
        assert self.selected(deployment.content["spec"]["selector"]["matchLabels"])

    def test_services(self):
        for service in of_kind("Service"):
            [port] = service.content["spec"]["ports"]
            assert port["targetPort"] in ports_of(self.selected(service.content["spec"]["selector"]))

    def test_a_leader_is_told_from_its_workers(self):
        [group] = of_kind("LeaderWorkerSet")
        [service] = [each for each in of_kind("Service") if each.file == group.file]
        matching = [
            pod
            for pod in pods(group)
            if service.content["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert len(matching) == 1

    def test_the_budget_leaves_a_replica(self):
        [budget], [deployment] = of_kind("PodDisruptionBudget"), of_kind("Deployment")
        assert self.selected(budget.content["spec"]["selector"]["matchLabels"])
        assert budget.content["spec"]["maxUnavailable"] < deployment.content["spec"]["replicas"]

    def test_the_monitor(self):
        [monitor] = of_kind("ServiceMonitor")
        spec = monitor.content["spec"]
        [service] = [
            each.content
            for each in of_kind("Service")
            if spec["selector"]["matchLabels"].items() <= each.content["metadata"]["labels"].items()
        ]
        [endpoint] = spec["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["path"] == "/metrics"
        assert service["metadata"]["labels"][spec["jobLabel"]] == "jsg", "the job of the alerts"
        _, server = configured(self.selected(service["spec"]["selector"])["args"])
        assert server.open_metrics, "the monitor has no key"

    def test_what_scales(self):
        [scaled], [deployment] = of_kind("ScaledObject"), of_kind("Deployment")
        spec = scaled.content["spec"]
        assert spec["scaleTargetRef"]["name"] == deployment.content["metadata"]["name"]
        assert spec["minReplicaCount"] == deployment.content["spec"]["replicas"] < spec["maxReplicaCount"]

    def test_the_router(self):
        servers = of_file("kubernetes/llm-d-values.yaml")["router"]["modelServers"]
        container = self.selected(servers["matchLabels"])
        _, server = configured(container["args"])
        assert [port["number"] for port in servers["targetPorts"]] == [server.port]
        assert server.metrics_alias == servers["type"] and server.open_metrics
        [deployment] = of_kind("Deployment")
        assert pods(deployment)[0]["metadata"]["labels"]["llm-d.ai/engine-type"] == servers["type"]

    def test_others_reach_only_the_port_that_serves(self):
        [policy], [group] = of_kind("NetworkPolicy"), of_kind("LeaderWorkerSet")
        spec = policy.content["spec"]
        everybody = spec["podSelector"]["matchLabels"]
        assert all(everybody.items() <= pod["metadata"]["labels"].items() for pod in pods(group))
        inner, outer = spec["ingress"]
        assert inner == {"from": [{"podSelector": spec["podSelector"]}]}
        assert [port["port"] for port in outer["ports"]] == list(ports_of(self.selected(everybody)).values())


def test_ray_builds_the_application_with_these_arguments():
    [service] = of_kind("RayService")
    config = yaml.safe_load(service.content["spec"]["serveConfigV2"])
    [application] = config["applications"]
    assert application["import_path"] == "jsg.ray:build"
    options = pytest.importorskip("jsg.ray.options").Options(**application["args"])
    [group] = service.content["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert options.bounds == (group["replicas"], group["replicas"])
    assert limits["nvidia.com/gpu"] == str(options.num_gpus)
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] >= options.drain_s


def test_skypilot_probes_the_port_of_the_server():
    task = of_file("skypilot/jsg.yaml")
    assert task["resources"]["ports"] == ServerConfig().port
    assert task["service"]["readiness_probe"]["path"] in PROBES
    assert set(re.findall(r"\$(\w+)", task["run"])) == set(task["envs"])
    assert set(task["secrets"]) <= set(KEY_VARIABLES.values())


COMPOSE = of_file("compose/compose.yaml")
SERVICES = COMPOSE["services"]
REPLICAS = [name for name, service in SERVICES.items() if service.get("image") == "jsg:0.1.0"]
CONFIGS = {name: yaml.safe_load(config["content"]) for name, config in COMPOSE["configs"].items()}


class TestCompose:
    def mounts(self, service: str) -> dict[str, str]:
        """Where the files and configs of a service are in it → their sources."""
        own = SERVICES[service]
        mounts = {config["target"]: config["source"] for config in own.get("configs", [])}
        return mounts | {volume["target"]: volume["source"] for volume in own["volumes"]}

    def test_what_is_mounted_exists(self):
        for service in SERVICES.values():
            for volume in service.get("volumes", []):
                if volume["type"] == "volume":
                    assert volume["source"] in COMPOSE["volumes"]
                elif not volume["source"].startswith("${"):
                    assert (DEPLOY / "compose" / volume["source"]).is_file()
            assert {config["source"] for config in service.get("configs", [])} <= set(CONFIGS)
        build = SERVICES[REPLICAS[0]]["build"]
        assert (DEPLOY / "compose" / build["context"] / build["dockerfile"]).is_file()

    def test_each_replica_has_a_gpu_of_its_own(self):
        reservations = [SERVICES[name]["deploy"]["resources"]["reservations"] for name in REPLICAS]
        devices = [device for each in reservations for item in each["devices"] for device in item["device_ids"]]
        assert len(REPLICAS) == len(set(devices)) == len(devices) == 2

    def test_replicas_end_within_their_grace(self):
        for name in REPLICAS:
            _, server = configured(SERVICES[name]["command"])
            least = server.drain_delay + server.shutdown_timeout + MIN_EXIT_S
            assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= least

    def test_the_gateway_notices_an_end_before_the_delay_is_over(self):
        options = dict(argument.split("=") for argument in SERVICES["gateway"]["command"] if "=" in argument)
        assert options["--health-check-endpoint"] == "/ready"
        notices_s = int(options["--health-check-interval-secs"]) * (int(options["--health-failure-threshold"]) + 1)
        for name in REPLICAS:
            assert configured(SERVICES[name]["command"])[1].drain_delay > notices_s

    def test_the_gateway_and_prometheus_know_the_replicas(self):
        addresses = [f"{name}:{configured(SERVICES[name]['command'])[1].port}" for name in REPLICAS]
        gateway = SERVICES["gateway"]
        assert [url.removeprefix("http://") for url in gateway["command"] if url.startswith("http://")] == addresses
        assert set(gateway["depends_on"]) == set(REPLICAS)
        jobs = {job["job_name"]: job for job in CONFIGS["prometheus"]["scrape_configs"]}
        assert jobs["jsg"]["static_configs"] == [{"targets": addresses}], "the job of the alerts"
        options = dict(argument.split("=") for argument in gateway["command"] if "=" in argument)
        assert jobs["smg"]["static_configs"] == [{"targets": [f"gateway:{options['--prometheus-port']}"]}]
        assert gateway["ports"] == [f"127.0.0.1:{options['--port']}:{options['--port']}"]

    def test_prometheus_finds_the_rules_and_grafana_the_board(self):
        [rules] = CONFIGS["prometheus"]["rule_files"]
        assert self.mounts("prometheus")[f"/etc/prometheus/{rules}"] == "../prometheus/jsg.rules.yml"
        [provider] = CONFIGS["boards"]["providers"]
        assert self.mounts("grafana")[f"{provider['options']['path']}/jsg.json"] == "../grafana/jsg.json"

    def test_only_this_machine_reaches_it(self):
        published = [port for service in SERVICES.values() for port in service.get("ports", [])]
        assert all(port.startswith("127.0.0.1:") for port in published)


def test_commands_in_comments_name_files_that_exist():
    for document in DOCUMENTS:
        for line in (DEPLOY / document.file).read_text().splitlines():
            if re.match(r"#   (kubectl apply|helm|sky) ", line):
                names = [word for word in shlex.split(line, comments=False) if word.endswith(".yaml")]
                folder = DEPLOY.parent if "/" in names[0] else (DEPLOY / document.file).parent
                assert all((folder / name).is_file() for name in names), line
