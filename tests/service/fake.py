"""A fake launchctl: an executable that records its arguments, keeps what is loaded, and fails when
a test says so."""

import os
from pathlib import Path

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
