"""Fakes of launchctl and systemctl: executables that record what they are asked, keep what is
loaded, and fail when a test says so."""

import os
from pathlib import Path

import pytest

# As observed of the real one: 113 from print for a label that is not there, 3 from bootout, 5 from
# a
# bootstrap of what is still there. `linger` has a line for each print after a bootout that still
# finds it;
# `busy` has a status for each bootstrap to fail with; `alone`: nobody is logged in; `disabled`: the
# label is.
LAUNCHCTL = r"""
loaded=loaded; case $* in *menubar*) loaded=loaded.menubar;; esac
[ -e alone ] && { echo "Could not find domain for user gui" >&2; exit 125; }
case "$1 $2" in
  print\ gui/*/*) if [ -s linger ] && [ ! -e $loaded ]; then sed -i 1d linger; exit 0; fi
         [ -e $loaded ] || exit 113;;
  print-disabled*) [ -e disabled ] && printf '\t"dev.mlxspec" => disabled\n';;
  enable*) rm -f disabled;;
  bootstrap*) if [ -s busy ]; then read -r status < busy; sed -i 1d busy
           echo "Bootstrap failed: $status: Input/output error" >&2; exit $status; fi
         [ -s linger ] || [ -e $loaded ] || [ -e disabled ] || [ ! -e "$3" ] && {
           echo "Bootstrap failed: 5" >&2; exit 5; }
         touch $loaded;;
  bootout*) [ -e $loaded ] || exit 3; rm $loaded;;
  kickstart*) [ -e $loaded ] || exit 113;;
esac
exit 0
"""

SYSTEMCTL = """
shift
[ -e alone ] && { echo "Failed to connect to bus: No medium found" >&2; exit 1; }
units=$HOME/.config/systemd/user
case $1 in
  is-active) [ -e loaded ] || exit 3;;
  enable) [ -e "$units/$2" ] || exit 1
          mkdir -p "$units/sockets.target.wants"; ln -sf "$units/$2" "$units/sockets.target.wants/$2";;
  start) [ -e "$units/$2" ] || exit 5; touch loaded;;
  stop) rm -f loaded;;
esac
exit 0
"""


LOOKS = ("print", "print-disabled", "is-active", "show-environment")


class Fake:
    """`fail` a command, named by the word that says what it does, `times` over."""

    def __init__(self, root: Path, name: str, body: str) -> None:
        self.root, self.verb = root, 1 if name == "launchctl" else 2
        (root / "bin").mkdir(parents=True)
        script = root / "bin" / name
        script.write_text(
            f'#!/bin/sh\ncd {root}\necho "$*" >> calls\nset -- "$@"\n'
            f'if [ -s fail ] && [ "${self.verb}" = "$(head -n1 fail)" ]; then\n'
            f'  sed -i 1d fail; echo "${self.verb} failed: made up" >&2; exit 9\nfi\n{body}'
        )
        script.chmod(0o755)

    def fail(self, verb: str, times: int = 1) -> None:
        (self.root / "fail").write_text(f"{verb}\n" * times)

    def linger(self, times: int) -> None:
        (self.root / "linger").write_text("\n" * times)

    @property
    def loaded(self) -> bool:
        return any(self.root.glob("loaded*"))

    def calls(self) -> list[str]:
        """What changed something, since the last look."""
        file = self.root / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in lines if line.split()[self.verb - 1] not in LOOKS]


def install(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A fake on a PATH that has no other; HOME is of the test's own already."""
    fake = Fake(root, name, {"launchctl": LAUNCHCTL, "systemctl": SYSTEMCTL}[name])
    monkeypatch.setenv("PATH", f"{root / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    return fake


def tree(root: Path) -> dict[str, bytes]:
    """Every file under `root`, links by what they point at; folders by a slash."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = os.readlink(path).encode()
        else:
            found[name + "/" * path.is_dir()] = b"" if path.is_dir() else path.read_bytes()
    return found
