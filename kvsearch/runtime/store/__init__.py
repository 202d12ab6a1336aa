"""Where entries are: ragged storage, slots, states of layers, cache files."""
