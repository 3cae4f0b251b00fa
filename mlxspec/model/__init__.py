"""Models: where they come from, how they are loaded, run and sampled. mlx-lm defines them."""
