"""Drop-in modules that take the place of mlx-lm's routed experts."""
