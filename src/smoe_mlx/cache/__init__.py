"""Which experts are in memory: slot banks, eviction policies, and the cache that joins them."""
