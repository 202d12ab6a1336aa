"""Scores of LongBench that compare words: F1 and ROUGE-L, in English and in Chinese.

The score of a reply is the best over the references, in [0, 1]; tables multiply the mean by 100. Every table on
LongBench (SnapKV, PyramidKV, Ada-KV, CAKE, LAVa, EvolKV, LU-KV, PolyKV) uses the English ones; the Chinese ones are for
the 21 datasets (PolyKV), which others cut to the 16 English ones. Source: LongBench, arXiv 2308.14508, `metrics.py`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvsearch.tasks.metrics.packages import optional

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# as in the official scorer, which strips the closing one of the brackets 《》 only, and none of 〈〉
CHINESE_PUNCTUATION = "、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿" + "–—‘’‛“”„‟…‧﹏"
FULL_WIDTH = "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"
_NO_ASCII = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION + FULL_WIDTH)


def qa_f1(reply: str, answers: Sequence[str]) -> float:
    """Return F1 of the words of reply and answer, counted with their multiplicity.

    Before, texts are lowered, ASCII punctuation is deleted (not replaced: "well-known" is one word), and then the words
    a, an and the. Other punctuation stays part of its word. 0 if either has no words left.
    Tables: narrativeqa, qasper, multifieldqa_en, hotpotqa, 2wikimqa, musique, triviaqa.
    """
    words = _english(reply)
    return max(f1(words, _english(answer)) for answer in answers)


def qa_f1_zh(reply: str, answers: Sequence[str]) -> float:
    """Return F1 of the words that jieba cuts reply and answer into, counted with their multiplicity.

    Words are lowered after they were cut, and lose punctuation (ASCII and Chinese) and white space; empty ones are
    dropped. Tables: multifieldqa_zh. EnvironmentFault without jieba.
    """
    words = _chinese(reply)
    return max(f1(words, _chinese(answer)) for answer in answers)


def rouge_l(reply: str, answers: Sequence[str]) -> float:
    """Return F of ROUGE-L (summary level) as the package `rouge` 1.0.1 computes it; not that of `rouge-score`.

    Sentences end at every full stop, words are told apart by white space, case and punctuation count. The union of the
    longest common subsequences is over distinct words, and so are the lengths. 1e-8 in the denominator keeps a perfect
    reply below 1. Where the package fails, the score is 0, as in the official scorer: for a reply of nothing but full
    stops, and where a pair of sentences has so many words (about a thousand together) that its recursion is too deep.
    Tables: gov_report, qmsum, multi_news, samsum. EnvironmentFault without the package.
    """
    return max(_rouge(reply, answer) for answer in answers)


def rouge_l_zh(reply: str, answers: Sequence[str]) -> float:
    """Score as `rouge_l`, by the words that jieba cuts reply and answer into, punctuation included.

    Chinese full stops end no sentence. Tables: dureader, vcsum. EnvironmentFault without the packages.
    """
    spaced = _spaced(reply)
    return max(_rouge(spaced, _spaced(answer)) for answer in answers)


def f1(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Return F1 of two bags of words, 0 where they have none in common."""
    common = (Counter(words) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _english(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_ASCII)).split()


def _chinese(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_NO_PUNCTUATION).split()) for word in optional("jieba").cut(text))
    return [word for word in words if word]


def _spaced(text: str) -> str:
    return " ".join(optional("jieba").cut(text))


def _rouge(reply: str, answer: str) -> float:
    score = optional("rouge").Rouge(metrics=["rouge-l"], stats=["f"]).get_scores
    # in a thread of its own: how deep the package may recurse must not depend on how deep its caller is
    with ThreadPoolExecutor(max_workers=1) as fresh:
        try:
            return float(fresh.submit(score, reply, answer).result()[0]["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0
