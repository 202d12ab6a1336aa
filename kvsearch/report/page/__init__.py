"""One self-contained page for runs of any kind: `kvsearch report`."""
