"""The audit of the dependencies: what fails, what is excused, and what it says when the advisory service is out of reach."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("audit", ROOT / "tools" / "audit.py")
audit = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(audit)

CLEAN = {"name": "fine", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["3"]}]}
UNKNOWN = {"name": "mine", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("report", "allowed", "status", "words"),
    [
        ([CLEAN], {}, 0, "1 packages audited, 0 open"),
        ([CLEAN, BAD], {}, 1, "bad 2 CVE-1, mended in 3"),
        ([CLEAN, BAD], {"CVE-1": "the part is not used here"}, 0, "is known: the part is not used here"),
        ([CLEAN, BAD], {"PYSEC-1": "the part is not used here"}, 0, "0 open findings"),
        ([CLEAN], {"CVE-9": "the part is not used here"}, 0, "no longer found; remove it"),
        ([CLEAN, UNKNOWN], {}, 0, "1 unknown to the service (mine)"),
        ([UNKNOWN], {}, 0, "nothing was audited"),
    ],
)
def test_a_finding_fails_unless_it_is_listed(report, allowed, status, words, capsys):
    assert audit.verdict(report, allowed) == status
    said = capsys.readouterr()
    assert words in said.out + said.err


def test_an_exception_needs_a_reason(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("CVE-1: later\n")
    with pytest.raises(ValueError, match="CVE-1 needs a reason"):
        audit.exceptions(path)
    assert isinstance(audit.exceptions(audit.EXCEPTIONS), dict)


def test_without_pip_audit_it_is_an_error_and_no_pass(monkeypatch, capsys):
    monkeypatch.setattr(audit, "COMMAND", (sys.executable, "-c", "raise SystemExit('No module named pip_audit')"))
    assert audit.main() == 2 and "make install-dev" in capsys.readouterr().err


def test_the_real_program_offline_says_so_and_passes():
    pytest.importorskip("pip_audit")
    closed = {"HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    command = [sys.executable, str(ROOT / "tools" / "audit.py")]
    done = subprocess.run(command, env={**os.environ, **closed}, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and "cannot be reached, nothing was audited" in done.stdout, done.stdout + done.stderr


def test_what_pip_audit_prints_is_understood():
    text = json.dumps({"dependencies": [CLEAN, BAD], "fixes": []})
    assert list(audit.findings(audit.read_report(text))) == [("bad 2", {"PYSEC-1", "CVE-1"}, "3")]
    assert audit.read_report("Traceback") is None and audit.read_report("[]") is None
