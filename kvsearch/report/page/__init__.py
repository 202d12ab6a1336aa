"""One self-contained page about runs: `kvsearch report`."""
