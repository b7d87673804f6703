"""Check deploy/kubernetes against the API's own schemas, without kubectl: `make check-kubernetes`.

`render` does what `kubectl kustomize` does with what these files use of it, and refuses the rest.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu")
# The oldest and the newest that the schemas are taken from.
VERSIONS = ("1.30", "1.36")
_KNOWN = {"apiVersion", "kind", "resources", "images", "configMapGenerator", "patches"}


def render(folder: Path) -> list[Manifest]:
    """All manifests of a kustomization. Raises ValueError for what it does not know."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := set(kustomization) - _KNOWN:
        raise ValueError(f"{folder}: {', '.join(sorted(unknown))}: not known here")
    manifests: list[Manifest] = []
    for name in kustomization.get("resources", ()):
        path = folder / name
        if path.is_dir():
            manifests += render(path)
        else:
            manifests += [each for each in yaml.safe_load_all(path.read_text()) if each]
    manifests += [_config_map(folder, each) for each in kustomization.get("configMapGenerator", ())]
    for patch in kustomization.get("patches", ()):
        operations = yaml.safe_load((folder / patch["path"]).read_text())
        chosen = [each for each in manifests if _is_target(each, patch["target"])]
        if not chosen:
            raise ValueError(f"{folder / patch['path']}: changes nothing: {patch['target']}")
        for manifest in chosen:
            for operation in operations:
                apply(manifest, copy.deepcopy(operation))
    images = {each["name"]: each for each in kustomization.get("images", ())}
    for container in (each for manifest in manifests for each in containers(manifest)):
        if change := images.get(container["image"]):
            container["image"] = f"{change['newName']}:{change['newTag']}"
    return manifests


def apply(manifest: Manifest, operation: dict[str, Any]) -> None:
    """One operation of RFC 6902. Raises KeyError where there is no such place."""
    *way, last = (
        part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]
    )
    place: Any = manifest
    for part in way:
        place = place[int(part)] if isinstance(place, list) else place[part]
    match operation["op"]:
        case "add" if isinstance(place, list):
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        case "add":
            place[last] = operation["value"]
        case "replace" if last in place:
            place[last] = operation["value"]
        case "remove" if last in place:
            del place[last]
        case _:
            raise KeyError(f"{operation['op']} {operation['path']}")


def pod_of(manifest: Manifest) -> Manifest | None:
    """The template of the pods that it makes."""
    spec = manifest.get("spec", {})
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    template: Manifest | None = spec.get("template")
    return template


def containers(manifest: Manifest) -> list[Manifest]:
    pod = pod_of(manifest)
    return [] if pod is None else list(pod["spec"]["containers"])


def problems(manifests: Sequence[Manifest], version: str) -> Iterator[str]:
    """What breaks the schemas of this version of Kubernetes, unknown fields included."""
    import kubernetes_validate

    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            place = ".".join(str(part) for part in error.path)
            yield f"{name}: {place}: {error.message} (Kubernetes {version})"


def main(root: Path = ROOT) -> int:
    found = [
        f"{overlay}: {problem}"
        for overlay in OVERLAYS
        for version in VERSIONS
        for problem in problems(render(root / "overlays" / overlay), version)
    ]
    print("\n".join(found or [f"deploy/kubernetes: all right for {' and '.join(VERSIONS)}"]))
    return 1 if found else 0


def _config_map(folder: Path, generator: dict[str, Any]) -> Manifest:
    if generator.get("options") != {"disableNameSuffixHash": True}:
        raise ValueError(f"{folder}: {generator['name']}: options: must disable the suffix")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": generator["name"], "namespace": generator["namespace"]},
        "data": {name: (folder / name).read_text() for name in generator["files"]},
    }


def _is_target(manifest: Manifest, target: dict[str, str]) -> bool:
    return manifest["kind"] == target["kind"] and bool(
        re.fullmatch(target["name"], manifest["metadata"]["name"])
    )


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
