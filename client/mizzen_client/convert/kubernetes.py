"""Converts Kubernetes' Jobs and JobSets; a file may have several objects."""

import re
from typing import Any

from mizzen_client.convert import kubernetes_fields as table
from mizzen_client.convert.conversion import (
    CannotConvert,
    Carryover,
    Conversion,
    fitting_name,
    named,
    shown,
)
from mizzen_client.convert.kubernetes_counts import PodCounts
from mizzen_client.convert.kubernetes_pods import PodJob, convert_pod
from mizzen_client.convert.kubernetes_variables import PodIndex
from mizzen_client.convert.quantities import duration_text
from mizzen_client.convert.source_tree import KeyedSection, Located, as_text, read_trees
from mizzen_client.documents import without_empty

_MOST_RETRIES = 1000
_DEFAULT_BACKOFF = 6


def convert(text: str, name: str) -> Conversion:
    """Convert the YAML or JSON `text`; `name` is that of its file, without the folder.

    Raises:
        CannotConvert: see the message.
    """
    conversion = Conversion("kubernetes")
    objects = [one for tree in read_trees(text) for one in _objects(conversion, tree)]
    configs = {str(one.within("metadata", "name")): one for one in objects if one.within("kind") == "ConfigMap"}
    for one in objects:
        kind = one.within("kind")
        if kind == "Job":
            conversion.documents.append(_Manifest(conversion, one, configs).job())
        elif kind == "JobSet":
            conversion.documents += _Manifest(conversion, one, configs).jobset()
        else:
            _other(conversion, one, str(kind))
    if not conversion.documents:
        lost = "; ".join(f"{one.source}: {one.why}" for one in conversion.remarks if one.outcome is Carryover.LOST)
        message = f"{name} has neither a Job nor a JobSet{f' ({lost})' if lost else ''}"
        raise CannotConvert(objects[0].line if objects else 1, message)
    return conversion


def _objects(conversion: Conversion, tree: Located) -> list[Located]:
    if not isinstance(tree.value, dict):
        raise CannotConvert(tree.line, "a manifest must be a mapping with apiVersion and kind")
    if tree.within("kind") == "List" and "items" in tree.keys:
        conversion.dropped(tree.line, "kind: List", "its items are converted one by one")
        return [one for item in tree.keys["items"].items for one in _objects(conversion, item)]
    return [tree]


def _other(conversion: Conversion, one: Located, kind: str) -> None:
    source = f"{kind} {shown(one.within('metadata', 'name'))}"
    if kind == "ConfigMap":
        conversion.changed(one.line, source, "files or env", "its values are copied to where a Job uses them")
    elif kind in table.OTHER_KINDS:
        conversion.dropped(one.line, source, table.OTHER_KINDS[kind])
    else:
        why = table.OTHER_LOST.get(kind, "only Jobs and JobSets are converted")
        conversion.lost(one.line, source, why)


class _Manifest:
    """One Job or JobSet."""

    def __init__(self, conversion: Conversion, tree: Located, configs: dict[str, Located]) -> None:
        self._conversion, self._configs = conversion, configs
        self._object = KeyedSection(conversion, tree)
        for key, pattern in (("apiVersion", r"(batch/v1|jobset\.x-k8s\.io/v1.*)"), ("kind", "Job|JobSet")):
            node = self._object.text(key)
            if node is None or not re.fullmatch(pattern, node.value):
                right = "batch/v1 for a Job, and jobset.x-k8s.io/v1alpha2 for a JobSet"
                raise CannotConvert(node.line if node else tree.line, f"{key}: must be {right}")
            self._object.carried(key, node, "version")
        self._name, self._labels, self._source_name = self._metadata()
        self._groups = _groups(tree.within("spec", "replicatedJobs"))
        self._spec = self._object.section("spec")

    def _metadata(self) -> tuple[str, dict[str, str], str]:
        metadata = self._object.section("metadata")
        node, prefix = metadata.text("name"), metadata.text("generateName")
        given = node or prefix
        if given is None:
            raise CannotConvert(self._object.line, "metadata.name is missing")
        key = "name" if node else "generateName"
        name = named(self._conversion, given.line, f"metadata.{key}: {given.value}", given.value)
        labels = {}
        for label, value in metadata.entries("labels").items():
            if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?", label):
                labels[label] = as_text(value.plain)
                self._conversion.carried(value.line, f"metadata.labels.{label}", "labels")
            else:
                self._conversion.dropped(
                    value.line, f"metadata.labels.{label}", "a label's key has at most 63 characters"
                )
        metadata.close(table.METADATA_DROPPED, {})
        return name, labels, given.value

    def job(self) -> dict[str, Any]:
        """Return the document of a Job."""
        spec = self._spec
        counts = PodCounts(spec)
        template = spec.section("template")
        is_gang = counts.is_gang(template)
        index = PodIndex(
            index='"$RANK"' if is_gang else '"$MIZZEN_ARRAY_INDEX"',
            is_indexed=counts.is_indexed,
            hosts={rf"\b{re.escape(self._source_name)}-0\.[a-z0-9][a-z0-9.-]*": "$MASTER_ADDR"},
        )
        pod = convert_pod(template, "main", "jobs[0]", index, self._configs)
        tasks, array = counts.shape(is_gang)
        if is_gang:
            pod.fields["tasks"] = tasks
        limits = without_empty({"max_runtime": self._deadline(), "retries": self._retries()})
        self._suspend()
        spec.close(table.JOB_DROPPED, table.JOB_LOST)
        self._end()
        return _document(self._name, self._labels, [pod], limits, array)

    def _deadline(self) -> str | None:
        node = self._spec.number("activeDeadlineSeconds", 1)
        if node is None:
            return None
        why = "it counts the running time of the workload, or of an element of an array, and not its time in the queue"
        self._spec.changed("activeDeadlineSeconds", node, "limits.max_runtime", why)
        return duration_text(node.value)

    def _retries(self) -> Any:
        spec = self._spec
        total, each = spec.number("backoffLimit"), spec.number("backoffLimitPerIndex")
        if total is not None:
            why = "it counts attempts of the gang, or of an element of an array, and not pods of the whole Job"
            spec.changed("backoffLimit", total, "limits.retries", why)
        if each is not None:
            spec.carried("backoffLimitPerIndex", each, "limits.retries")
        given = each or total
        if given is None:
            why = f"Kubernetes tries {_DEFAULT_BACKOFF} times again by default"
            self._conversion.carried(spec.line, "no backoffLimit", f"limits.retries ({why})")
        retries = min(given.value, _MOST_RETRIES) if given is not None else _DEFAULT_BACKOFF
        policy = spec.section("podFailurePolicy")
        exits: dict[str, int] = {}
        for rule in policy.each("rules"):
            exits |= _exits(rule)
        policy.close({}, {})
        return {"exit": {**exits, "other": retries}} if exits else retries

    def _suspend(self) -> None:
        if (node := self._spec.take("suspend")) is not None:
            if node.value and "kueue.x-k8s.io/queue-name" in self._labels:
                self._spec.dropped("suspend", node, "it is for Kueue; mizzen's own queue starts the workload")
            elif node.value:
                self._spec.lost("suspend", node, "run `mizzen hold NAME` after the submission")
            else:
                self._spec.dropped("suspend", node, "a workload starts as soon as it can")

    def _end(self) -> None:
        self._object.close({"status": "it is written by Kubernetes"}, {})

    def jobset(self) -> list[dict[str, Any]]:
        """Return the documents of a JobSet: one, and one for each job that waits for another one's end."""
        spec = self._spec
        jobs: dict[str, tuple[PodJob, str | None]] = {}
        waits: dict[str, str] = {}
        numbers = {name: number for group in self._groups.values() for number, name in enumerate(group)}
        for one in spec.each("replicatedJobs"):
            name = one.text("name")
            if name is None or name.value not in numbers or name.value in jobs:
                raise CannotConvert(one.line, f"{one.path}.name: must be given, and unique among replicatedJobs")
            number = numbers[name.value]
            self._conversion.carried(name.line, f"{one.path}.name: {name.value}", f"jobs[{number}].name")
            if before := self._waits(one):
                waits[name.value] = before
            jobs[name.value] = self._replicated(one, name.value, number)
        if not jobs:
            raise CannotConvert(spec.line, "spec.replicatedJobs has no job")
        retries = self._failures()
        self._suspend()
        if node := spec.take("startupPolicy"):
            spec.changed("startupPolicy", node, "jobs", "all jobs of a document start together")
        spec.close(table.JOBSET_DROPPED, table.JOBSET_LOST)
        self._end()
        return [self._group(first, jobs, waits, retries) for first in self._groups]

    def _group(
        self, first: str, jobs: dict[str, tuple[PodJob, str | None]], waits: dict[str, str], retries: int | None
    ) -> dict[str, Any]:
        """Return the document of the jobs that start together."""
        names = self._groups[first]
        deadlines = [deadline for name in names if (deadline := jobs[name][1])]
        limits = without_empty({"max_runtime": deadlines[0] if deadlines else None, "retries": retries})
        document = _document(self._name_of(first), self._labels, [jobs[name][0] for name in names], limits, None)
        if first not in waits:
            return document
        before = next((root for root, group in self._groups.items() if waits[first] in group), None)
        if before is None:
            raise CannotConvert(self._spec.line, f"dependsOn: {waits[first]}: no job of the JobSet has this name")
        after = [{"workload": self._name_of(before), "condition": "succeeded"}]
        return {"version": 1, "name": document["name"], "after": after, **document}

    def _name_of(self, first: str) -> str:
        """Return the name of the workload of a group."""
        return self._name if first == next(iter(self._groups)) else fitting_name(f"{self._name[:40]}-{first[:20]}")

    def _waits(self, one: KeyedSection) -> str | None:
        found = None
        for dependency in one.each("dependsOn"):
            name, status = dependency.text("name"), dependency.text("status")
            if name is None or status is None or status.value not in ("Complete", "Ready"):
                raise CannotConvert(
                    dependency.line, f"{dependency.path}: needs a name, and the status Complete or Ready"
                )
            source = f"{dependency.path}: {name.value} {status.value}"
            if status.value == "Complete":
                found = name.value
                why = "the job is a workload of its own"
                self._conversion.changed(dependency.line, source, "after", why)
            else:
                why = "all jobs of a document start together: wait for the other one's port in the program"
                self._conversion.changed(dependency.line, source, "jobs", why)
            dependency.close({}, {})
        return found

    def _replicated(self, one: KeyedSection, name: str, number: int) -> tuple[PodJob, str | None]:
        replicas = one.number("replicas", 1)
        if node := one.take("groupName"):
            one.dropped("groupName", node, "jobs have no groups")
        template = one.section("template")
        if node := template.take("metadata"):
            template.dropped("metadata", node, "labels belong to the document; those of the JobSet are there")
        job = template.section("spec")
        counts = PodCounts(job)
        pods = counts.pods
        base = re.escape(self._source_name)
        hosts = {}
        for sibling in (sibling for group in self._groups.values() for sibling in group):
            pattern = rf"\b{base}-{re.escape(sibling)}-0-0(?:\.[a-z0-9][a-z0-9.-]*)?"
            if sibling == name:
                hosts[pattern] = "$MASTER_ADDR"
            elif any(name in group and sibling in group for group in self._groups.values()):
                hosts[pattern] = f"${{MIZZEN_JOB_{fitting_name(sibling).upper().replace('-', '_')}_ADDR%%:*}}"
            elif re.search(pattern, job.text_of()):
                why = "the two jobs are different workloads, which do not have each other's addresses"
                self._conversion.lost(one.line, f"{one.path}: the host {self._source_name}-{sibling}-0-0", why)
        index = PodIndex(f"$((RANK % {pods}))", f"$((RANK / {pods}))", not counts.is_unindexed, hosts)
        pod = convert_pod(job.section("template"), fitting_name(name), f"jobs[{number}]", index, self._configs)
        counts.note(f"jobs[{number}].tasks")
        pod.fields["tasks"] = pods * (replicas.value if replicas else 1)
        if replicas is not None:
            one.carried("replicas", replicas, f"jobs[{number}].tasks")
        inner = job.number("activeDeadlineSeconds", 1)
        if inner is not None:
            why = "it counts the running time of the whole workload"
            job.changed("activeDeadlineSeconds", inner, "limits.max_runtime", why)
        for key in ("backoffLimit", "backoffLimitPerIndex", "podFailurePolicy"):
            if node := job.take(key):
                job.changed(key, node, "limits.retries", "the gang starts again as `limits.retries` says")
        job.close(table.JOB_DROPPED, table.JOB_LOST)
        template.close({}, {})
        one.close({}, {})
        return pod, duration_text(inner.value) if inner is not None else None

    def _failures(self) -> int | None:
        policy = self._spec.section("failurePolicy")
        node = policy.number("maxRestarts")
        if node is not None:
            policy.carried("maxRestarts", node, "limits.retries")
        policy.close(
            {"restartStrategy": "the whole gang starts again"},
            {"rules": "give `limits.retries` for each exit status"},
        )
        return min(node.value, _MOST_RETRIES) if node is not None else None


def _groups(jobs: Any) -> dict[str, list[str]]:
    """Return the groups of a JobSet's jobs that start together, by the name of the first job of each.

    A job that waits for the end of another one begins a group; one that waits until another is ready is in its group.
    """
    groups: dict[str, list[str]] = {}
    for job in jobs if isinstance(jobs, list) else []:
        if not isinstance(job, dict) or not isinstance(name := job.get("name"), str):
            continue
        depends = job.get("dependsOn")
        waits = [one for one in depends if isinstance(one, dict)] if isinstance(depends, list) else []
        ready = {str(one.get("name")) for one in waits if one.get("status") == "Ready"}
        ends = any(one.get("status") == "Complete" for one in waits)
        fitting = [first for first, group in groups.items() if ready & {*group}]
        first = name if ends or not groups else fitting[0] if fitting else next(iter(groups))
        groups.setdefault(first, []).append(name)
    return groups


def _exits(rule: KeyedSection) -> dict[str, int]:
    """Return the retries by exit status that a rule of a podFailurePolicy gives."""
    action, codes, conditions = rule.text("action"), rule.take("onExitCodes"), rule.take("onPodConditions")
    source = f"{rule.path}: {action.value if action else ''}"
    rule.close({}, {})
    values = codes.within("values") if codes is not None else None
    if action is not None and codes is not None and isinstance(values, list):
        if action.value in ("FailJob", "FailIndex") and codes.within("operator") == "In":
            rule.conversion.carried(rule.line, f"{source} {shown(values)}", "limits.retries.exit")
            return {as_text(value): 0 for value in values}
        if action.value == "Ignore" and codes.within("operator") == "In":
            rule.conversion.changed(
                rule.line, f"{source} {shown(values)}", "limits.retries.exit", f"at most {_MOST_RETRIES} times"
            )
            return {as_text(value): _MOST_RETRIES for value in values}
        if action.value == "Count":
            rule.conversion.carried(rule.line, f"{source} {shown(values)}", "limits.retries")
            return {}
    if action is not None and action.value == "Ignore" and conditions is not None:
        rule.conversion.carried(rule.line, f"{source} disruptions", "limits.retries (they do not count)")
        return {}
    rule.conversion.lost(rule.line, source, "give `limits.retries` for each exit status")
    return {}


def _document(
    name: str, labels: dict[str, str], pods: list[PodJob], limits: dict[str, Any], array: dict[str, Any] | None
) -> dict[str, Any]:
    """Return a document with the jobs of `pods`."""
    regions = [region for pod in pods for region in pod.regions]
    capacity = [kind for pod in pods for kind in pod.capacity]
    graces = [pod.grace for pod in pods if pod.grace]
    return without_empty({
        "version": 1, "name": name, "labels": labels, "array": array,
        "checkpoint": {"grace": graces[0]} if graces else None, "limits": limits,
        "regions": {"allow": list(dict.fromkeys(regions))} if regions else None,
        "capacity": list(dict.fromkeys(capacity)),
        "files": {path: text for pod in pods for path, text in pod.files.items()},
        "jobs": [{key: pod.fields[key] for key in _ORDER if key in pod.fields} for pod in pods],
    })  # fmt: skip


_ORDER = ("name", "tasks", "resources", "image", "image_pull_secret", "run", "env", "secrets")
