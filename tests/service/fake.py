"""A fake launchctl: an executable that records its arguments, keeps what is loaded, and fails when
a test says so."""

import os
from pathlib import Path
from typing import Any

import pytest

# As observed of the real one: `print` of an unknown label ends with 113, `bootout` with 3, and
# `bootstrap` soon after a `bootout` with 5. `linger` has a line for each `print` after a bootout
# that still finds the label; the file `disabled` says that the label is.
SCRIPT = r"""#!/bin/sh
cd {root}
echo "$*" >> calls
[ -s fail ] && [ "$1" = "$(cat fail)" ] && { rm fail; echo "made up" >&2; exit 9; }
loaded=loaded; case $* in *menubar*) loaded=loaded.menubar;; esac
case "$1" in
  print) if [ -s linger ] && [ ! -e $loaded ]; then sed -i 1d linger; exit 0; fi
         [ -e $loaded ] || exit 113;;
  enable) rm -f disabled;;
  bootstrap) [ -s linger ] || [ -e $loaded ] || [ -e disabled ] || [ ! -e "$3" ] && exit 5
         touch $loaded;;
  bootout) [ -e $loaded ] || exit 3; rm $loaded;;
esac
exit 0
"""


class Launchctl:
    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir(parents=True)
        script = root / "bin/launchctl"
        script.write_text(SCRIPT.replace("{root}", str(root)))
        script.chmod(0o755)

    def fail(self, verb: str) -> None:
        (self.root / "fail").write_text(verb)

    @property
    def loaded(self) -> bool:
        return (self.root / "loaded").exists()

    def calls(self) -> list[str]:
        """The verbs of the calls that change something, since the last look."""
        file = self.root / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line.split()[0] for line in lines if line.split()[0] != "print"]


def install(root: Path, monkeypatch: pytest.MonkeyPatch) -> Launchctl:
    """A fake in PATH."""
    monkeypatch.setenv("PATH", f"{root / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return Launchctl(root)


# The keys of launchd.plist(5) that an agent may need, with the types that the page gives them; a
# dict holds the keys inside. `Crashed` is in the page since OS X 10.9. Read at
# https://leancrew.com/all-this/man/man5/launchd.plist.html (macOS 13) and in Apple's source,
# https://github.com/apple-oss-distributions/launchd/blob/main/man/launchd.plist.5 (OS X 10.9).
DOCUMENTED: dict[str, Any] = {
    "Label": str,
    "ProgramArguments": [str],
    "EnvironmentVariables": {str: str},
    "WorkingDirectory": str,
    "Umask": (int, str),
    "RunAtLoad": bool,
    "LimitLoadToSessionType": str,
    "KeepAlive": {"SuccessfulExit": bool, "Crashed": bool, "PathState": {str: bool}},
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "ProcessType": ("Background", "Standard", "Adaptive", "Interactive"),
    "Sockets": {
        str: {
            "SockType": ("stream", "dgram", "seqpacket"),
            "SockPassive": bool,
            "SockNodeName": str,
            "SockServiceName": (str, int),
            "SockFamily": ("IPv4", "IPv6", "IPv4v6", "Unix"),
            "SockProtocol": ("TCP", "UDP"),
        }
    },
}


def faults(value: Any, rule: Any, at: str = "") -> list[str]:
    """What a definition has that the table does not know, or has with another type."""
    if isinstance(rule, dict):
        if not isinstance(value, dict):
            return [f"{at}: not a dictionary"]
        found = []
        for key, inner in value.items():
            known = rule.get(key, rule.get(str))
            found += faults(inner, known, f"{at}/{key}") if known else [f"{at}/{key}: unknown"]
        return found
    if isinstance(rule, list):
        wrong = not isinstance(value, list) or any(type(one) is not rule[0] for one in value)
        return [f"{at}: not an array"] if wrong else []
    if isinstance(rule, tuple) and isinstance(rule[0], str):
        return [] if value in rule else [f"{at}: {value!r} is not a choice"]
    kinds = rule if isinstance(rule, tuple) else (rule,)
    return [] if type(value) in kinds else [f"{at}: {type(value).__name__}"]
