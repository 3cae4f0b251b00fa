"""Measurements, as ratios of one interleaved run: `python -m bench --help`. Not tests: nothing here
fails."""
