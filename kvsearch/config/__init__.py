"""How options are declared, and read from recipes; imports nothing but `kvsearch.plan`."""
