"""Imported by the fork server only (see spawn.PRELOAD): lets it outlive a signal that is sent to the whole process group.

SLURM and `timeout` signal every process of a job. The ranks answer with a checkpoint; the server that they were forked from
has to live until they are done, because their exit codes reach the parent through it. The signals are blocked rather than
ignored: one that reaches a rank in its first milliseconds then waits until that rank can answer, instead of being lost.
"""

import signal

BLOCKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
