"""Ways to run a whole model forward."""
