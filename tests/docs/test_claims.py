"""What README and docs claim in numbers stands there, with the commands that make it."""

from scripts.claims import missing_texts, read_claims


def test_claims_stand_in_their_files() -> None:
    assert {name: missing_texts(claim) for name, claim in read_claims().items() if missing_texts(claim)} == {}
