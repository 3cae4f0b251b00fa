"""The background service on macOS: launchd listens and starts `mlxspec serve` on demand. Also what
asks a running server, started so or not."""
