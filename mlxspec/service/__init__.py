"""The background service on macOS: launchd listens and starts `mlxspec serve` on demand."""
