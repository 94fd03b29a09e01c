"""Put on PYTHONPATH by the kill harness: strikes at the n-th file event that matches, from inside whichever process causes it.

KILL_POINT is JSON: event (an audit event of Python: open, os.rename, os.mkdir, shutil.rmtree), pattern (searched in its first two
arguments), nth (counted in each process), delay (seconds from the event to the blow), signal, and to (group | leader). Audit events
come before the act that they announce. KILL_NOTE is a file that says that the blow fell. NET_NOTE, a file too, gets a JSON line for every look-up of a host and every
connection that is tried. No code of the project is changed.
"""

import json
import os
import re
import signal
import sys
import threading
import time


def _arm(point: dict, note: str) -> None:
    pattern, seen, busy = re.compile(point["pattern"]), [0], [False]

    def strike() -> None:
        busy[0] = True
        with open(note, "a") as file:
            file.write(f"{time.time()} {os.getpid()}\n")
        number = signal.Signals[point["signal"]]
        if point["to"] == "leader":
            os.kill(os.getpgrp(), number)
        else:
            os.killpg(os.getpgrp(), number)

    def hook(event: str, arguments: tuple) -> None:
        if event != point["event"] or busy[0] or not any(isinstance(a, str | os.PathLike) for a in arguments[:2]):
            return
        text = " ".join(str(a) for a in arguments[:2] if isinstance(a, str | os.PathLike))
        if not pattern.search(text):
            return
        seen[0] += 1
        if seen[0] == point["nth"]:
            if point["delay"]:
                timer = threading.Timer(point["delay"], strike)
                timer.daemon = True
                timer.start()
            else:
                strike()

    sys.addaudithook(hook)


def _watch_network(note: str) -> None:
    def hook(event: str, arguments: tuple) -> None:
        if event == "socket.getaddrinfo":
            target = arguments[0]
        elif event == "socket.connect" and isinstance(arguments[1], tuple):  # a path is a socket of this machine
            target = arguments[1][0]
        else:
            return
        name = target.decode() if isinstance(target, bytes) else str(target)
        local = name in ("localhost", "None", "") or name.startswith("127.") or name == "::1"
        with open(note, "a") as file:
            file.write(json.dumps({"event": event, "target": name, "local": local, "command": sys.argv[:2]}) + "\n")

    sys.addaudithook(hook)


if "NET_NOTE" in os.environ:
    _watch_network(os.environ["NET_NOTE"])
if "KILL_POINT" in os.environ:
    _arm(json.loads(os.environ["KILL_POINT"]), os.environ["KILL_NOTE"])
