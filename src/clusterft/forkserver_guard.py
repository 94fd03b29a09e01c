"""Imported by the fork server only (see spawn.PRELOAD): lets it outlive a signal that is sent to the whole process group.

SLURM and `timeout` signal every process of a job. The ranks answer with a checkpoint; the server that they were forked from
has to live until they are done, because their exit codes reach the parent through it. Ranks set these signals back first
thing.
"""

import signal

IGNORED = (signal.SIGTERM, signal.SIGUSR1)

for _number in IGNORED:
    signal.signal(_number, signal.SIG_IGN)
