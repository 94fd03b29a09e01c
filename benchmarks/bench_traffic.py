"""Bytes that one optimiser step sends between processes: the message carrier, counted by the kernel.

    python benchmarks/bench_traffic.py [--processes 2 4]        as root: it makes a network namespace of its own

In the namespace nothing but this training uses the loopback device, so its counter is the traffic. A small Llama (2.0 M parameters,
float32) is trained for six steps of real gloo ranks; the steps after the first two count. Writes benchmarks/results/traffic.json.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "traffic.json"
STEPS, IGNORED_STEPS = 6, 2
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4}


def bring_loopback_up() -> None:
    """A new network namespace has a loopback device, but down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, 0x8913, name))[1]  # SIOCGIFFLAGS
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", flags | 1))  # SIOCSIFFLAGS, IFF_UP


def sent_bytes() -> int:
    """Bytes that the loopback device has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("/proc/net/dev lists no loopback device")


def train_entry(*, dist: Any, out: str) -> None:
    """One rank; rank 0 writes the counter after each step."""
    import torch
    from training_kit import VOCABULARY, rows, sampler_config, selection, trainer_config
    from transformers import LlamaConfig, LlamaForCausalLM

    from clusterft.trainer import train

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **SHAPE))
    encoded, marks = rows(12 * STEPS), []
    settings = (selection(encoded), trainer_config(epochs=1), sampler_config())
    options = {"out_dir": Path(out), "seed": 5, "carrier": "messages", "on_step": lambda line: marks.append(sent_bytes())}
    train(model, encoded, *settings, dist=dist, **options)
    if dist.is_main:
        gradient = 4 * sum(p.numel() for p in model.parameters())
        Path(out, "facts.json").write_text(json.dumps({"gradient_bytes": gradient, "marks": marks}))


def measure(processes: int) -> dict[str, Any]:
    from clusterft import launch

    with tempfile.TemporaryDirectory() as out:
        launch.run("bench_traffic:train_entry", {"out": out}, processes=processes, threads=1)
        facts = json.loads(Path(out, "facts.json").read_text())
    marks = facts["marks"][IGNORED_STEPS - 1 :]
    step = (marks[-1] - marks[0]) / (len(marks) - 1)
    formula = 2 * (processes - 1) * facts["gradient_bytes"]
    return {"processes": processes, "gradient_bytes": facts["gradient_bytes"], "step_bytes": step, "of_formula": step / formula}


def markdown(report: dict[str, Any]) -> str:
    """The table of the benchmark page."""
    lines = ["| processes | gradient, MB | sent by all in a step, MB | of 2 (P − 1) G |", "|---|---|---|---|"]
    for one in report["results"]:
        sizes = f"{one['gradient_bytes'] / 1e6:.2f} | {one['step_bytes'] / 1e6:.2f}"
        lines.append(f"| {one['processes']} | {sizes} | {one['of_formula']:.3f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        return subprocess.run(["unshare", "--net", sys.executable, *sys.argv, "--inside"], check=False).returncode
    bring_loopback_up()
    paths = [str(HERE), str(HERE.parent / "tests")]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    report = {"results": [measure(processes) for processes in options.processes]}
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
