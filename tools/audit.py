"""`make check`: known vulnerabilities of the installed packages, by pip-audit.

    pip-audit --local ► findings less tools/audit_exceptions.yaml ► exit status

Exit status 1: a finding that is not listed with a reason. 0: none, or the advisory service is out of reach, which is said in a line; then nothing was
proved. pip-audit itself says "no known vulnerabilities" when a package index answers without advisories; here that counts as out of reach. 2: the
audit could not be carried out for another reason.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

EXCEPTIONS = Path(__file__).with_name("audit_exceptions.yaml")
COMMAND = (
    sys.executable,
    "-m",
    "pip_audit",
    "--local",
    "--skip-editable",
    "--format",
    "json",
    "--progress-spinner",
    "off",
    "--timeout",
    "10",
)
OFFLINE = re.compile(
    r"ConnectionError|ConnectTimeout|ReadTimeout|ProxyError|NameResolution|SSLError|ServiceError|Max retries exceeded"
)


def main() -> int:
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    report = read_report(done.stdout)
    if report is None:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
        if OFFLINE.search(done.stderr):
            print(f"audit: the advisory service cannot be reached, nothing was audited ({last})")
            return 0
        print(f"audit: pip-audit did not work ({last}); run `make install-dev`", file=sys.stderr)
        return 2
    return verdict(report, exceptions(EXCEPTIONS))


def read_report(text: str) -> list[dict[str, Any]] | None:
    """The packages of pip-audit's JSON, or None if there is none."""
    try:
        return list(json.loads(text)["dependencies"])
    except (ValueError, KeyError, TypeError):
        return None


def exceptions(path: Path) -> dict[str, str]:
    """Advisory id -> why it does not stop us. Raises ValueError for an entry without a reason."""
    listed = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for name, reason in listed.items():
        if not isinstance(reason, str) or len(reason.split()) < 4:
            raise ValueError(f"{path}: {name} needs a reason in words")
    return dict(listed)


def findings(report: list[dict[str, Any]]) -> Iterator[tuple[str, set[str], str]]:
    """(package and version, all ids of the advisory, versions that mend it)."""
    for package in report:
        for one in package.get("vulns", ()):
            fixed = ", ".join(one.get("fix_versions", ())) or "no version yet"
            yield f"{package['name']} {package['version']}", {one["id"], *one.get("aliases", ())}, fixed


def verdict(report: list[dict[str, Any]], allowed: Mapping[str, str]) -> int:
    """Prints what was found and returns the exit status."""
    skipped = [p["name"] for p in report if "skip_reason" in p]
    if len(skipped) == len(report):
        print(f"audit: the package index knows no advisories for any of the {len(report)} packages, nothing was audited")
        return 0
    open_ones, used = [], set()
    for package, ids, fixed in findings(report):
        known = sorted(ids & set(allowed))
        used.update(known)
        if known:
            print(f"audit: {package} {known[0]} is known: {allowed[known[0]]}")
        else:
            open_ones.append(f"{package} {min(ids)}, mended in {fixed}")
    for name in sorted(set(allowed) - used):
        print(f"audit: {name} is listed in {EXCEPTIONS.name} and no longer found; remove it")
    for line in open_ones:
        print(f"audit: {line}; update the pin, or list the id with a reason in {EXCEPTIONS}", file=sys.stderr)
    more = (
        f", {len(skipped)} unknown to the service ({', '.join(skipped[:5])}{', ...' if len(skipped) > 5 else ''})"
        if skipped
        else ""
    )
    print(f"audit: {len(report) - len(skipped)} packages audited{more}, {len(open_ones)} open findings")
    return int(bool(open_ones))


if __name__ == "__main__":
    sys.exit(main())
