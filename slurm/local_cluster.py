"""A real SLURM of two nodes on this machine, for trying scripts out and for tests.

    python slurm/local_cluster.py -- slurm/submit.sh table2 +scale=laptop --wait

Needs root and Debian's slurm-wlm and munge. munged, one slurmctld and the slurmd of n1 and n2 live below one temporary folder and
end, by their pids, with the command. Partition `low` is the default; a job in `high` takes its nodes away (requeue after a grace).
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("n1", "n2")
CPUS = 4
"""CPUs that each node claims to have, whatever the machine has: tasks share the real ones."""

CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=200000,batch_sched_delay=0,defer_batch
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SwitchType=switch/none
KillWait=5
MinJobAge=600
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=60
{nodes}
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """The reason why no SLURM can be started here, or None."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "starting munged and slurmd needs root"
    return None


def free_ports(n: int) -> list[int]:
    """Distinct ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(n)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _end_with_parent() -> None:
    """The kernel ends a daemon when the process that started it is gone, also one that was killed and could not clean up."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


class LocalCluster:
    """Context manager: the daemons of a cluster; `env` holds what SLURM's commands need to find it."""

    def __init__(self, grace: int = 60) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self.env = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.grace = grace
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, *command: str, env: Mapping[str, str] | None = None, **options: object) -> subprocess.CompletedProcess:
        """A command that sees this cluster, its output captured as text."""
        settings = {"capture_output": True, "text": True, "timeout": 600, "check": False} | options
        return subprocess.run(command, env={**os.environ, **self.env, **(env or {})}, **settings)

    def _start(self) -> None:
        host = socket.gethostname()
        ctld_port, *ports = free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=1000 State=UNKNOWN"
            for name, port in zip(NODES, ports, strict=True)
        ]
        text = CONF.format(host=host, ctld_port=ctld_port, folder=self.folder, nodes="\n".join(nodes), grace=self.grace)
        (self.folder / "slurm.conf").write_text(text)
        for name in ("state", *(f"spool-{n}" for n in NODES)):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        places = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._daemon("munged", "--foreground", "--force", *(f"--{k}={self.folder}/{v}" for k, v in places.items()))
        self._await("munged", lambda: (self.folder / "munge.sock").exists())
        self._daemon("slurmctld", "-D", "-c")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        self._await("the nodes", lambda: self.run("sinfo", "-h", "-o", "%T %D").stdout.split() == ["idle", str(len(NODES))])

    def _daemon(self, *command: str) -> None:
        log = (self.folder / f"{command[0]}.out").open("ab")
        self._daemons.append(
            subprocess.Popen(
                command,
                env={**os.environ, **self.env},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        )

    def _await(self, what: str, ready: object, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            dead = [d for d in self._daemons if d.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up in {seconds:.0f} s{self._last_words(dead)}")
            time.sleep(0.1)

    def _last_words(self, dead: Sequence[subprocess.Popen]) -> str:
        lines = [f"; {Path(d.args[0]).name} ended with {d.returncode}" for d in dead]
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            lines.append(f"\n--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:]))
        return "".join(lines)

    def stop(self) -> None:
        """Cancels all jobs, then ends every process that belongs to this cluster, each by its pid."""
        if len(self._daemons) > 1:
            self.run("scancel", "--user=root")
            deadline = time.monotonic() + 15
            while time.monotonic() < deadline and self.run("squeue", "-h").stdout.strip():
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self._leftovers():
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _leftovers(self) -> list[psutil.Process]:
        """Processes that were started with this cluster's SLURM_CONF: step daemons of a job that would not end."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
            except psutil.Error:
                continue
            if ours and process.pid != os.getpid():
                found.append(process)
        return found


def main(arguments: Sequence[str]) -> int:
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    reason = why_not()
    if reason is not None or not command:
        print(f"skipped: {reason}" if reason else "usage: python slurm/local_cluster.py -- COMMAND ...", file=sys.stderr)
        return 0 if reason else 2
    with LocalCluster() as cluster:
        return subprocess.run(command, env={**os.environ, **cluster.env}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
