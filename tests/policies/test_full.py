from __future__ import annotations

from kvsearch.policies.full import FullKV
from tests.policies.examples import kept, plain


def test_keeps_everything() -> None:
    assert kept(FullKV(), plain(4), 4) == {0, 1, 2, 3}
