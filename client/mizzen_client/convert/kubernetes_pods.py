"""Converts the pod template of a Job to a job of a document, and to fields of the whole document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from mizzen_client.convert import kubernetes_fields as table
from mizzen_client.convert.conversion import CannotConvert, fitting_name, shown
from mizzen_client.convert.kubernetes_variables import PodIndex, command_of, variables_of
from mizzen_client.convert.quantities import cores, duration_text, gpu_model, memory_text, quantity
from mizzen_client.convert.source_tree import KeyedSection, Located, as_text
from mizzen_client.documents import without_empty

_GUESSED_BYTES = 4 << 30


@dataclass
class PodJob:
    """A job, and the fields of the whole document that its pod template determines."""

    fields: dict[str, Any] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    capacity: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    grace: str | None = None


def convert_pod(template: KeyedSection, name: str, at: str, index: PodIndex, configs: Mapping[str, Located]) -> PodJob:
    """Return the job `name` for a pod template. `at` is its path in the document, `configs` are ConfigMaps by name.

    Raises:
        CannotConvert: a value is invalid.
    """
    return _Pod(template, name, at, index, configs).convert()


class _Pod:
    def __init__(
        self, template: KeyedSection, name: str, at: str, index: PodIndex, configs: Mapping[str, Located]
    ) -> None:
        self._template, self._at, self._index, self._configs = template, at, index, configs
        self._pod = template.section("spec")
        self._job = PodJob({"name": name})
        self._gpu_type: str | None = None

    def convert(self) -> PodJob:
        pod, job = self._pod, self._job
        self._metadata()
        containers = list(pod.each("containers"))
        if not containers:
            raise CannotConvert(pod.line, "the pod template has no containers")
        self._restart()
        self._selector()
        volumes = {str(one.within("name")): one for one in self._volumes()}
        self._container(containers[0], volumes)
        for other in containers[1:]:
            why = "a task has one container: start the program in `run`, or write a job of its own"
            name = other.text("name")
            other.conversion.lost(other.line, f"{other.path} ({name.value if name else ''})", why)
        self._grace()
        self._secrets()
        if node := pod.take("subdomain"):
            pod.changed("subdomain", node, self._at, "tasks find each other by MASTER_ADDR, without DNS names")
        if node := pod.take("activeDeadlineSeconds"):
            pod.lost("activeDeadlineSeconds", node, "give `limits.max_runtime`, which is for all attempts together")
        pod.close(table.POD_DROPPED, table.POD_LOST)
        self._template.close({}, {})
        return job

    def _metadata(self) -> None:
        metadata = self._template.section("metadata")
        for key, why in (
            ("labels", "labels belong to the document; those of the Job are there"),
            ("name", "tasks have numbers"),
        ):
            if node := metadata.take(key):
                metadata.dropped(key, node, why)
        metadata.close(table.METADATA_DROPPED, {})

    def _restart(self) -> None:
        node = self._pod.text("restartPolicy")
        if node is None:
            return
        if node.value not in ("Never", "OnFailure"):
            raise CannotConvert(node.line, f"restartPolicy: {node.value}: a Job's must be Never or OnFailure")
        why = "a failed task makes its gang start again, `limits.retries` times"
        self._pod.changed("restartPolicy", node, "limits.retries", why)

    def _selector(self) -> None:
        for key, node in self._pod.entries("nodeSelector").items():
            source, value, note = (
                f"nodeSelector.{key}: {as_text(node.plain)}",
                as_text(node.plain),
                self._pod.conversion,
            )
            if key in table.GPU_LABELS:
                self._gpu_type = gpu_model(value) or fitting_name(value)
                why = f"the type is {self._gpu_type}: write it as `mizzen machines` shows it"
                note.changed(node.line, source, f"{self._at}.resources.accelerators", why)
            elif key in table.REGION_LABELS:
                self._job.regions = [fitting_name(value)]
                note.changed(
                    node.line, source, "regions.allow", "regions are names of the installation (`mizzen regions`)"
                )
            elif key in table.SPOT_LABELS:
                self._job.capacity = ["spot"] if value in table.SPOT_LABELS[key] else ["reserved", "on_demand"]
                note.carried(node.line, source, "capacity")
            elif key in table.PLAIN_LABELS:
                note.dropped(node.line, source, table.PLAIN_LABELS[key])
            else:
                note.lost(
                    node.line,
                    source,
                    "machines have no labels: restrict `regions`, or name GPU types in `accelerators`",
                )

    def _volumes(self) -> list[Located]:
        node = self._pod.take("volumes")
        return node.items if node is not None else []

    def _container(self, container: KeyedSection, volumes: dict[str, Located]) -> None:
        name, at = container.text("name"), self._at
        if name is not None:
            container.dropped("name", name, "a job has one container")
        self._image(container)
        variables = variables_of(container, at, self._index, self._configs)
        self._resources(container)
        self._mounts(container, volumes)
        folder = container.text("workingDir")
        if folder is not None:
            container.changed(
                "workingDir",
                folder,
                f"{at}.run",
                "the command begins with cd; the working directory is that of the task",
            )
        run = command_of(container, at, variables, self._index, folder.value if folder else None)
        container.close(table.CONTAINER_DROPPED, table.CONTAINER_LOST)
        self._job.fields |= without_empty({"run": run, "env": variables.env, "secrets": variables.secrets})

    def _image(self, container: KeyedSection) -> None:
        image = container.text("image")
        if image is None:
            raise CannotConvert(container.line, f"{container.path} has no image")
        container.carried("image", image, f"{self._at}.image")
        self._job.fields["image"] = image.value

    def _resources(self, container: KeyedSection) -> None:
        section = container.section("resources")
        given = {kind: dict(section.entries(kind)) for kind in ("limits", "requests")}
        section.close({}, {"claims": "name GPU types in `accelerators`"})
        fields: dict[str, Any] = {}
        names = [name for kind in given.values() for name in kind]
        for name in dict.fromkeys(names):
            limit, request = given["limits"].get(name), given["requests"].get(name)
            used = (request or limit) if name == "cpu" else (limit or request)
            assert used is not None
            number = self._quantity(name, used)
            if name in table.GPU_RESOURCES:
                fields["accelerators"] = f"{self._gpu_type or 'gpu'}:{int(number)}"
                self._gpus(section, used, name, int(number))
            elif name == "cpu":
                fields["cpus"] = cores(number)
            elif name == "memory":
                fields["memory"] = self._memory(used, number)
            self._note_resource(section, name, limit, request)
        if "memory" not in fields:
            fields["memory"] = memory_text(_GUESSED_BYTES)
            why = "4GiB is written, because the container names no memory"
            container.conversion.changed(container.line, "no memory", f"{self._at}.resources.memory", why)
        self._job.fields["resources"] = fields

    def _quantity(self, name: str, node: Located) -> Fraction:
        try:
            return quantity(as_text(node.plain))
        except ValueError as error:
            raise CannotConvert(node.line, f"resources: {name}: {shown(node.plain)!r} {error}") from None

    def _memory(self, node: Located, number: Fraction) -> str:
        try:
            return memory_text(ceil(number))
        except ValueError as error:
            raise CannotConvert(node.line, f"resources: memory: {shown(node.plain)!r}: {error}") from None

    def _gpus(self, section: KeyedSection, node: Located, name: str, count: int) -> None:
        if not 1 <= count <= 62:
            raise CannotConvert(
                node.line, f"resources: {name}: {count}: a task has 1 to 62 GPUs; leave the line out for none"
            )
        if self._gpu_type is None:
            why = "no GPU type is given: replace `gpu` with a type that `mizzen machines` shows"
            section.conversion.changed(node.line, f"{name}: {count}", f"{self._at}.resources.accelerators", why)

    def _note_resource(self, section: KeyedSection, name: str, limit: Located | None, request: Located | None) -> None:
        target = {"cpu": "cpus", "memory": "memory"}.get(name, "accelerators" if name in table.GPU_RESOURCES else "")
        differ = limit is not None and request is not None and as_text(limit.plain) != as_text(request.plain)
        for kind, node in (("limits", limit), ("requests", request)):
            if node is None:
                continue
            source, path = f"resources.{kind}.{name}: {as_text(node.plain)}", f"{self._at}.resources.{target}"
            if not target:
                why = "a document asks for GPUs, cores and memory only"
                outcome = section.conversion.dropped if name == "ephemeral-storage" else section.conversion.lost
                outcome(node.line, source, why)
            elif differ and (kind == "limits") == (name == "cpu"):
                why = "a document has one number: the requested cores, and the limit of the memory"
                section.conversion.changed(node.line, source, path, why)
            else:
                section.conversion.carried(node.line, source, path)

    def _mounts(self, container: KeyedSection, volumes: dict[str, Located]) -> None:
        mounted: set[str] = set()
        for mount in container.each("volumeMounts"):
            name, path = mount.text("name"), mount.text("mountPath")
            if name is None or path is None or name.value not in volumes:
                raise CannotConvert(mount.line, f"{mount.path}: needs a mountPath and the name of one of the volumes")
            mounted.add(name.value)
            self._mount(mount, volumes[name.value], name.value, path.value)
            keys = ("readOnly", "recursiveReadOnly", "mountPropagation", "subPath", "subPathExpr")
            mount.close(dict.fromkeys(keys, "mizzen mounts no volumes"), {})
        for unused in volumes.keys() - mounted:
            container.conversion.dropped(volumes[unused].line, f"volumes: {unused}", "the container does not mount it")

    def _mount(self, mount: KeyedSection, volume: Located, name: str, path: str) -> None:
        note, source = mount.conversion, f"volumeMounts: {name}: {path}"
        kind = next((key for key in volume.keys if key != "name"), "emptyDir")
        config = self._configs.get(str(volume.within("configMap", "name")))
        if kind == "emptyDir":
            if path.rstrip("/") in ("/dev/shm", "/tmp", "/var/tmp"):
                note.dropped(mount.line, source, "each task can write there")
            else:
                note.lost(mount.line, source, "the image is read-only: write to the working directory, or to /tmp")
            note.dropped(
                volume.line, f"volumes: {name}: emptyDir", "each task has a working directory, /tmp and /dev/shm"
            )
        elif kind == "configMap" and config is not None:
            for key, node in config.keys["data"].keys.items() if "data" in config.keys else ():
                self._job.files[f"{name}/{key}"] = as_text(node.plain)
            why = f"the files are in the folder {name} of the working directory: change the paths in the command"
            note.lost(mount.line, source, why)
            note.changed(volume.line, f"volumes: {name}: configMap", "files", "it is the ConfigMap of this file")
        else:
            why = "mizzen mounts no volumes: use `tables` for data, `workdir` for code, or a bucket"
            note.lost(mount.line, source, why)
            note.lost(volume.line, f"volumes: {name}: {kind}", why)

    def _grace(self) -> None:
        node = self._pod.number("terminationGracePeriodSeconds")
        if node is None:
            return
        self._job.grace = duration_text(min(node.value, 3600))
        if node.value > 3600:
            self._pod.changed("terminationGracePeriodSeconds", node, "checkpoint.grace", "it is at most an hour")
        else:
            self._pod.carried("terminationGracePeriodSeconds", node, "checkpoint.grace")

    def _secrets(self) -> None:
        for number, secret in enumerate(self._pod.each("imagePullSecrets")):
            name = secret.text("name")
            if name is None or number:
                secret.conversion.lost(secret.line, secret.path, "a job has one image_pull_secret")
            else:
                self._job.fields["image_pull_secret"] = fitting_name(name.value)
                why = "store USER:PASSWORD with `mizzen tenants secrets` under this name"
                secret.conversion.changed(
                    secret.line, f"imagePullSecrets: {name.value}", f"{self._at}.image_pull_secret", why
                )
            secret.close({}, {})
