"""The progress of long work."""

import logging

import pytest

from mlxspec import progress


def test_without_a_terminal_progress_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO, "mlxspec")
    with progress.progress("Reading") as report:
        report(1, 4)
        assert not caplog.messages, "nothing is logged at once"
        monkeypatch.setattr(progress, "LOG_S", -1.0)
        report(2, 4)
    assert caplog.messages == ["Reading: 50 %"]
    assert capsys.readouterr().err == ""
