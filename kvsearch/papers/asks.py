"""What papers ask, and what stands in for it in the language of the bundled models."""

from __future__ import annotations

from kvsearch.papers.table import Ask

AGNOSTIC, AWARE = "question-agnostic", "question-aware"
# about how long prompts are, in tokens: LongBench's have 6,711 words on average, InfiniteBench's over 100,000 tokens
LONGBENCH_TOKENS, INFINITEBENCH_TOKENS, GSM8K_TOKENS = 10_000, 128_000, 1_000

LONGBENCH = Ask("longbench", 500, tokens=LONGBENCH_TOKENS)  # all there are
ENGLISH = Ask("longbench:english", 500, tokens=LONGBENCH_TOKENS)
SIX_QA = "longbench:narrativeqa,qasper,multifieldqa_en,hotpotqa,2wikimqa,musique"
SINGLE_QA, MULTI_QA = "longbench:narrativeqa,qasper,multifieldqa_en", "longbench:hotpotqa,2wikimqa,musique"
SIX_SUBSETS = "longbench:narrativeqa,hotpotqa,qmsum,trec,passage_retrieval_en,lcc"
NIAH_LENGTHS = (1000, 2000, 4000, 8000)

CORE = Ask("synthetic", 3, (512,))
RULER_FORMS = Ask("synthetic:ruler", 2, (512,))
SEARCHED = Ask("synthetic:single,multikey", 6, (512,))
SHORT = "short prompts in the language of the bundled models"


def ruler(length: int, qa: bool = True, block: str = "", samples: int = 500) -> Ask:
    """Return RULER at a length, with or without the two tasks that need files of questions."""
    return Ask("ruler" if qa else "ruler:no-qa", samples, (length,), block=block)
