"""Builds the shim's input for the tasks of an attempt: environment, user, sandbox or container, limits and rules."""

import errno
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent import connect_rules, device_rules
from agent.cgroups import TaskLimits, cgroups_of, engine_parent, limit, make_cgroup, remove_cgroup
from agent.config import AgentConfig
from agent.containers.engine import EngineError, open_engine
from agent.containers.launch import container_of
from agent.containers.local_images import ImageStore
from agent.credentials.task_credentials import TaskCredentials
from agent.device_rules import HeldGpus
from agent.element_chunks import lane_of
from agent.isolation import counts_processes, local_checkpoints, sandbox_of
from agent.launch import DEFAULT_PATH, Owner, TaskLaunch, environment, script_command, setup_command
from agent.memory_servers import MemoryServers
from agent.notices import MachineNotices
from agent.ports import NoFreePort, Ports, PortTaken
from agent.processes import task_environment
from agent.staged import BadLaunch, StagedAttempt
from agent.state import StateFolder
from agent.task_network import slirp4netns
from agent.task_readiness import Port, open_port
from agent.tasks import RunFolder
from domain.isolation import Isolation, TaskNetwork
from domain.launch import TaskPlace
from infra.users import user_name

_CHECK_BYTES = 512 << 20
_log = logging.getLogger(__name__)


class TaskLaunches:
    """Builds the shim's input for tasks on this machine. The methods block."""

    def __init__(self, config: AgentConfig, state: StateFolder, notices: MachineNotices, images: ImageStore) -> None:
        self._config = config
        self.ports = Ports(state, *config.ports)
        self.memory = MemoryServers(config, state, self.ports)
        self._notices = notices
        self._images = images
        self._warned: set[str] = set()
        self._making = threading.Lock()
        self._separated: set[str] = set()
        """Keys of attempts whose network has rules."""

    def owner(self, staged: StagedAttempt) -> Owner | None:
        """Returns the user that the attempt's tasks run as; None: the agent's user.

        Raises:
            BadLaunch: the machine has no user for the tenant.
        """
        try:
            return self._config.owner_of(staged.launch.tenant_number)
        except ValueError as error:
            raise BadLaunch(f"{staged.folder.key}: {error}") from None

    def credentials(self, staged: StagedAttempt) -> TaskCredentials:
        """Returns the source of the credentials with which the attempt's tasks use their buckets."""
        return TaskCredentials(self._config, staged.launch, staged.runs, self.owner(staged))

    def launch_of(self, staged: StagedAttempt, place: TaskPlace, masters: Mapping[str, str]) -> TaskLaunch:
        """Returns the shim's input for one task, and opens its port if it serves requests.

        Raises:
            NoFreePort, PortTaken: the task has no port (`agent.task_readiness.open_port`).
        """
        run = staged.run(place)
        cgroup = make_cgroup(run.run_id) if self._config.cgroup else None
        port = None
        if staged.launch.serving is not None and run == staged.serving_run:
            own_network = self._config.network is TaskNetwork.PORTS
            try:
                port = open_port(staged.folder, staged.launch.serving.port, self.ports, cgroup, own_network=own_network)
            except (NoFreePort, PortTaken):
                if cgroup is not None:
                    remove_cgroup(cgroup)
                raise
        if (image := staged.launch.jobs[place.job].image) is not None:
            return self._container_launch(staged, place, masters, port, image, cgroup)
        inside = None if port is None else port.inside
        limits = self._limits(run, place)
        # A task whose port is mapped, or whose connections have rules, must join the cgroup.
        if cgroup is not None and (self._separate(cgroup, staged, port) or port is not None):
            limits += (cgroup,)
        gpus, rules = self._gpus(staged, place, cgroup, staged.run(place).run_id)
        if rules is not None and rules not in limits:
            limits += (rules,)
        unlimited = self.plain_launch(staged, place, masters, inside, gpus)
        return replace(unlimited, cgroup=cgroup, limits=limits, ports=self._declared(staged, place, port))

    def _declared(self, staged: StagedAttempt, place: TaskPlace, port: Port | None) -> tuple[tuple[int, int], ...]:
        """Returns the machine's ports that are forwarded to a task's own network: for requests and rendezvous."""
        if self._config.network is TaskNetwork.HOST:
            return ()
        rendezvous = staged.folder.ports().get(place.job) if place.task == 0 else None
        pairs = [] if rendezvous is None else [(rendezvous, rendezvous)]
        return tuple(pairs if port is None else [*pairs, (port.outside, port.inside)])

    def _container_launch(
        self,
        staged: StagedAttempt,
        place: TaskPlace,
        masters: Mapping[str, str],
        port: Port | None,
        image: str,
        cgroup: str | None,
    ) -> TaskLaunch:
        """Returns the shim's input for a task with an image. The engine makes its container below `cgroup`."""
        parent = None
        if cgroup is not None and self._images.facts().has_cgroup_parents:
            parent = engine_parent(cgroup)
        if cgroup is not None and parent is None:
            remove_cgroup(cgroup)
            cgroup = None
            if "cgroups of engines" not in self._warned:
                self._warned.add("cgroups of engines")
                _log.warning(
                    "%s: tasks with an image have no rules for connections: the engine must use the cgroup driver"
                    " cgroupfs, and the agent must see the root of cgroup v2",
                    self._config.engine,
                )
        elif cgroup is not None:
            self._separate(cgroup, staged, port)
        held = _held_gpus(staged)
        inside = None if port is None else port.inside
        own = self.plain_launch(staged, place, masters, inside, held.visible(place.slots) if held.ids() else None)
        run, owner = staged.run(place), self.owner(staged)
        found = container_of(
            self._config, launch=staged.launch, runs=staged.runs, run=run, place=place, image=self._images.get(image),
            env=own.env, owner=owner, gpus=held.ids(), paths=self._paths(staged),
        )  # fmt: skip
        if self._config.cgroup and place.memory_bytes:
            limits = self._task_limits(place)
            found["spec"] |= {"memory_bytes": limits.memory_bytes, "processes": limits.processes}
            found["spec"] |= {"cpu_shares": limits.cpu_shares}
        found["spec"]["cgroup_parent"] = parent
        # The environment is in the container's description.
        return replace(own, argv=(), env={}, sandbox=None, setup=None, cgroup=cgroup, container=found)

    def session_launch(
        self, staged: StagedAttempt, run: RunFolder, argv: Sequence[str], **session: Any
    ) -> dict[str, Any]:
        """Returns the input of the shim of a session in a running task (`agent.sessions.session_shim`).

        The command gets the environment with which the task was started, as the kernel shows it: secrets are not kept
        elsewhere.

        Raises:
            OSError: the task has ended.
        """
        owner, container = self.owner(staged), run.container()
        pid = run.first_pid() if container is None else _first_pid(*container)
        limits = run.cgroups() if container is None else cgroups_of(pid)
        if container is not None and not limits:
            raise PermissionError(errno.EPERM, "the agent does not see the cgroups of containers")
        return {
            "argv": list(argv),
            "env": task_environment(pid) | {"TERM": session["term"]},
            "container_pid": None if container is None else pid,
            "cwd": str(run.work),
            "uid": owner.uid if owner else None,
            "gid": owner.gid if owner else None,
            "groups": owner.groups if owner else (),
            "sandbox": self._sandbox(staged, owner) if container is None else None,
            "limits": limits,
            "session": session,
        }

    def plain_launch(
        self,
        staged: StagedAttempt,
        place: TaskPlace,
        masters: Mapping[str, str],
        port: int | None,
        gpus: Sequence[int] | None = None,
    ) -> TaskLaunch:
        """Returns the shim's input without cgroups. `port`: the task's port; `gpus`: as in `environment`."""
        run = staged.run(place)
        job, owner = staged.launch.jobs[place.job], self.owner(staged)
        if gpus is None and (numbers := self._config.gpu_numbers):
            gpus = [numbers[slot] for slot in place.slots]
        env = environment(
            staged.launch,
            place,
            masters=masters,
            home=run.work,
            report=run.report,
            interval_file=run.interval_file,
            deadline_file=run.deadline_file,
            python=sys.executable if job.image is None else "python3",
            platform=self._notices.prior,
            secrets=staged.secrets.get(place.job, {}),
            user=user_name(os.geteuid() if owner is None else owner.uid),
            port=port,
            credentials=self.credentials(staged).environment(run),
            gpus=gpus,
            memory=self.memory.folder_of(staged.launch.workload_id),
        )
        search = f"{env['PATH']}:{DEFAULT_PATH}"
        first, *others = (staged.run(other) for other in staged.places if other.job == place.job)
        return TaskLaunch(
            argv=job.argv if job.script is None else script_command(job.script, run.script, search),
            env=env,
            cwd=str(run.work),
            output=str(run.output),
            errors=str(run.errors) if job.output == "separate" else None,
            grace_s=staged.launch.checkpoint.grace_s,
            uid=owner.uid if owner else None,
            gid=owner.gid if owner else None,
            groups=owner.groups if owner else (),
            sandbox=self._sandbox(staged, owner),
            setup=setup_command(job, env["MIZZEN_PYTHON"], run.setup_script, search),
            setup_by=None if run == first else str(first.begun),
            shares=tuple(str(other.work) for other in others) if run == first else (),
            restarts=job.restarts,
            lane=lane_of(staged.launch),
        )

    def _sandbox(self, staged: StagedAttempt, owner: Owner | None) -> dict[str, Any] | None:
        """Returns the arguments for the sandbox of an attempt, which are the same for all its tasks."""
        if self._config.isolation is not Isolation.SANDBOX:
            return None
        own = local_checkpoints(staged.launch)
        if owner is None and own is not None:
            own.mkdir(parents=True, exist_ok=True)  # A task could create it only in its sandbox.
        shm_bytes = sum(place.memory_bytes for place in staged.places)
        files = _held_gpus(staged).files()
        network = None
        if self._config.network is TaskNetwork.PORTS:
            closed = () if self._config.metadata_service else (*connect_rules.METADATA4, *connect_rules.METADATA6)
            network = {"program": slirp4netns(), "cgroup": self._network_cgroup(staged), "closed": closed}
        return sandbox_of(
            staged.folder.private, staged.launch, staged.runs, self._paths(staged), shm_bytes, files, network,
            self._most_processes(staged),
        )  # fmt: skip

    def _paths(self, staged: StagedAttempt) -> tuple[str, ...]:
        """Returns the paths of the machine that the attempt's tasks see, as in `AgentConfig.paths`."""
        memory = self.memory.folder_of(staged.launch.workload_id)
        return self._config.paths if memory is None else (*self._config.paths, str(memory))

    def _most_processes(self, staged: StagedAttempt) -> int:
        """Returns the limit on processes in the sandbox of an attempt, if it needs no cgroup; 0: there is none."""
        if not self._config.cgroup or not counts_processes():
            return 0
        return sum(self._task_limits(place).processes for place in staged.places if place.memory_bytes)

    def _network_cgroup(self, staged: StagedAttempt) -> str | None:
        """Returns a cgroup with the tenant's rules for connections, which slirp4netns opens for the attempt's tasks."""
        with self._making:
            cgroup = make_cgroup(f"{staged.folder.key}.network") if self._config.cgroup else None
            if cgroup is not None and staged.folder.key not in self._separated:
                self._separated.add(staged.folder.key)
                self._separate(cgroup, staged, listens=True)
            return cgroup

    def _separate(self, cgroup: str, staged: StagedAttempt, port: Port | None = None, *, listens: bool = False) -> bool:
        """Applies the rules for connections to a cgroup of an attempt. Returns False, with a warning, if it cannot.

        `port`: where the task in it serves requests. `listens`: its processes may listen on all ports.
        """
        if self._config.isolation is Isolation.NONE or os.geteuid() != 0:
            return False
        try:
            own = {*staged.folder.ports().values(), *(() if port is None else (port.inside, port.outside))}
            connect_rules.attach(
                cgroup,
                staged.launch.tenant_number,
                metadata=self._config.metadata_service,
                reserved=None if listens else self._config.ports,
                own=own,
            )
        except OSError as error:
            if "connections" not in self._warned:
                self._warned.add("connections")
                _log.warning("tasks can connect to tasks of other tenants on this machine: %s", error)
            return False
        return True

    def _gpus(
        self, staged: StagedAttempt, place: TaskPlace, cgroup: str | None, name: str
    ) -> tuple[list[int] | None, str | None]:
        """Forbids processes in `cgroup`, or in a new cgroup `name`, to open GPUs that the attempt does not hold.

        Returns the numbers of the task's GPUs as the task sees them (None: the slots), and the cgroup with the rules
        that the task must join. Logs a warning once if tasks cannot be kept from opening other GPUs.
        """
        held = _held_gpus(staged)
        closed, rules = held.closed(), None
        if not closed:
            return None, None
        problem = "the agent does not run as root" if os.geteuid() != 0 else "cgroups are switched off"
        if os.geteuid() == 0 and self._config.cgroup:
            try:
                rules = device_rules.close(cgroup, name, closed)
            except OSError as error:
                problem = str(error)
        if rules is None and self._config.isolation is not Isolation.SANDBOX:
            if "GPUs" not in self._warned:
                self._warned.add("GPUs")
                _log.warning("tasks can open GPUs of other tasks on this machine: %s", problem)
            return None, None
        return held.visible(place.slots), rules

    def _limits(self, run: RunFolder, place: TaskPlace) -> tuple[str, ...]:
        """Creates cgroups with the limits of the task's resource request and returns their paths.

        Logs a warning once for each controller that cannot be used.
        """
        if not self._config.cgroup or not place.memory_bytes:
            return ()
        folders, missing = limit(run.run_id, self._task_limits(place))
        if self._config.isolation is Isolation.SANDBOX and counts_processes():  # See `_most_processes`.
            missing = [name for name in missing if name != "pids"]
        new = [name for name in missing if name not in self._warned]
        if new:
            self._warned.update(new)
            _log.warning(
                "tasks have no limits on %s: the agent may not create cgroups with these controllers; "
                "run it as root, or delegate the controllers to it",
                ", ".join(new),
            )
        return tuple(folders)

    def check_cgroups(self, staged: StagedAttempt, place: TaskPlace) -> list[str]:
        """Creates cgroups with a task's limits and rules for a check that runs before the task, and returns them.

        The check may use `_CHECK_BYTES` of memory even if the task requests less.
        """
        if not self._config.cgroup:
            return []
        name, limits = f"{staged.run(place).run_id}.store", self._task_limits(place)
        found = limit(name, replace(limits, memory_bytes=max(limits.memory_bytes, _CHECK_BYTES)))[0]
        if (cgroup := make_cgroup(name)) is not None:
            self._separate(cgroup, staged)
        rules = self._gpus(staged, place, cgroup, name)[1]
        return list(dict.fromkeys(filter(None, (*found, cgroup, rules))))

    def _task_limits(self, place: TaskPlace) -> TaskLimits:
        processes = self._config.processes_per_task + self._config.processes_per_cpu * place.cpus_milli // 1000
        return TaskLimits(place.memory_bytes, processes, place.cpus_milli)


def _first_pid(socket: str, name: str) -> int:
    """Returns the pid of the first process of a container.

    Raises:
        OSError: it does not run, or this process may not enter it.
    """
    if os.geteuid() != 0:
        raise PermissionError(errno.EPERM, "only an agent that runs as root can enter containers")
    try:
        state = open_engine(socket).state(name)
    except EngineError as error:
        raise OSError(errno.EIO, f"the container engine: {error}") from None
    if state is None or not state.running or not state.pid:
        raise ProcessLookupError(errno.ESRCH, "the container does not run")
    return state.pid


def _held_gpus(staged: StagedAttempt) -> HeldGpus:
    return HeldGpus.of(slot for place in staged.places for slot in place.slots)
