"""Troubles that people have reported of tools of this kind, small, each with the right value."""
