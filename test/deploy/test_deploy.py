"""deploy/ matches the server that it starts: flags, probes, volumes and pins."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = DEPLOY / "kubernetes"


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def objects_by_kind() -> dict[str, list[dict]]:
    objects: dict[str, list[dict]] = {}
    for document in documents("server.yaml") + documents("monitoring.yaml"):
        objects.setdefault(document["kind"], []).append(document)
    return objects


@pytest.fixture(scope="module")
def pod(objects_by_kind) -> dict:
    return objects_by_kind["StatefulSet"][0]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def server(pod) -> dict:
    (container,) = pod["containers"]
    return container


def test_the_server_accepts_every_flag(server, smollm2, tmp_path) -> None:
    from sglang_canopy.doctor import command_line

    overrides = {"--model-path": str(smollm2), "--port": "30999"}
    argv = []
    for argument in server["args"]:
        name, _, value = argument.partition("=")
        value = value.replace("/var/cache/canopy", str(tmp_path))
        argv.append(f"{name}={overrides.get(name, value)}" if value else name)
    args = command_line.parse_options(argv)
    assert args.radix_eviction_policy == "auto"
    assert args.hicache_storage_backend == "canopy"
    assert not command_line.refusal_findings(args)


def test_every_key_comes_from_a_secret_and_is_never_written_down(server) -> None:
    env = {variable["name"]: variable for variable in server["env"]}
    keys = [argument for argument in server["args"] if "key" in argument.partition("=")[0]]
    assert keys
    for argument in keys:
        reference = re.fullmatch(r"\$\((\w+)\)", argument.partition("=")[2])
        assert reference, argument
        assert "secretKeyRef" in env[reference[1]]["valueFrom"]
    text = (MANIFESTS / "server.yaml").read_text(encoding="utf-8")
    for variable in env.values():
        if "valueFrom" in variable:
            assert f"--from-literal={variable['valueFrom']['secretKeyRef']['key']}=" in text


def test_probes_need_no_key_and_wait_long_enough(server) -> None:
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    routes = {getattr(route, "path", None) for route in app.routes}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        path = server[name]["httpGet"]["path"]
        assert path in routes
        decision = decide_request_auth(
            method="GET",
            path=path,
            authorization_header=None,
            api_key="k",
            admin_api_key="a",
            auth_level=AuthLevel.NORMAL,
        )
        assert decision.allowed
        if path == "/health":  # waits for an answer of the model
            from sglang.srt.entrypoints.http_server import HEALTH_CHECK_TIMEOUT

            assert server[name]["timeoutSeconds"] > HEALTH_CHECK_TIMEOUT


def test_every_volume_is_mounted_and_the_store_has_its_own(objects_by_kind, pod, server) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    claims = objects_by_kind["StatefulSet"][0]["spec"]["volumeClaimTemplates"]
    volumes |= {claim["metadata"]["name"] for claim in claims}
    mounts = {mount["name"]: mount["mountPath"] for mount in server["volumeMounts"]}
    assert set(mounts) == volumes
    config = next(argument for argument in server["args"] if "extra-config" in argument)
    path = Path(yaml.safe_load(config.partition("=")[2])["path"])
    assert path.parent == Path(mounts["kv"])  # a folder in it: the mount itself is root's
    claimed_size = claims[0]["spec"]["resources"]["requests"]["storage"]
    max_bytes = yaml.safe_load(config.partition("=")[2])["capacity_gb"] * 10**9
    assert max_bytes < 0.95 * int(claimed_size.removesuffix("Gi")) * 2**30


def test_no_pod_runs_as_root_or_with_more_rights(pod, server) -> None:
    assert pod["securityContext"]["runAsNonRoot"]
    assert not server["securityContext"]["allowPrivilegeEscalation"]
    assert server["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert server["securityContext"]["readOnlyRootFilesystem"]
    (home,) = (variable["value"] for variable in server["env"] if variable["name"] == "HOME")
    assert home in {mount["mountPath"] for mount in server["volumeMounts"]}
    assert pod["automountServiceAccountToken"] is False


def test_selectors_find_the_pods(objects_by_kind) -> None:
    labels = objects_by_kind["StatefulSet"][0]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Service", "StatefulSet", "NetworkPolicy", "ServiceMonitor"):
        for document in objects_by_kind[kind]:
            spec = document["spec"]
            selector = spec.get("selector") or spec["podSelector"]
            assert selector.get("matchLabels", selector).items() <= labels.items()


def test_images_are_of_the_pinned_releases() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    pins = (ROOT / "requirements" / "cuda.txt").read_text(encoding="utf-8")
    sglang = re.search(r"^sglang==([\d.]+)$", pins, re.MULTILINE)[1]
    torch = re.search(r'"torch==([\d.]+)"', project)[1]
    cuda_image = (DEPLOY / "Dockerfile.cuda").read_text(encoding="utf-8")
    assert f"lmsysorg/sglang:v{sglang}\n" in cuda_image
    assert f"'{sglang}'" in cuda_image
    cpu_image = (DEPLOY / "Dockerfile.cpu").read_text(encoding="utf-8")
    assert f"torch=={torch} " in cpu_image
    assert f"'{torch}'" in cpu_image
    assert f"torch=={torch}" in (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    for line in re.findall(r"(?:-r|-c) (requirements/[\w.-]+)", cpu_image):
        assert (ROOT / line).is_file()
    for folder in re.findall(r" (\./[\w/-]+)", cpu_image):
        assert (ROOT / folder / "pyproject.toml").is_file()


def test_kubernetes_defines_every_field(objects_by_kind) -> None:
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="22 MB of schemas: pip install kubernetes-validate"
    )
    for kind, documents in objects_by_kind.items():
        if kind not in ("ServiceMonitor", "PrometheusRule"):  # of the Prometheus operator
            for document in documents:
                schemas.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("dockerfile", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_an_image_ends_as_the_manifests_user(dockerfile, pod) -> None:
    lines = (DEPLOY / dockerfile).read_text(encoding="utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users[-1] == str(pod["securityContext"]["runAsUser"])
    assert f"useradd --uid {users[-1]} " in " ".join(lines)
