"""From a checkpoint to a vault: shatter it, requantise it, verify it."""
