"""Troubles that users of such tools report in public, as small inputs with the right value in each."""
