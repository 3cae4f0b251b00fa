"""The report of `scripts/first-mac`."""
