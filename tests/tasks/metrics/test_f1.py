"""F1 of words. Expected values are 2c / (n + m): c common words, n and m words of reply and answer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tasks.metrics.scoring import score

ENGLISH = [
    ("Paris", "Paris", 1),
    ("paris", "PARIS", 1),
    ("", "Paris", 0),
    ("Paris", "", 0),
    ("...", "Paris", 0),
    ("the a an", "Paris", 0),
    ("the", "the", 0),  # nothing is left of either
    ("red", "blue", 0),
    ("The Paris", "Paris", 1),
    ("Paris France", "Paris", 2 / 3),
    ("Paris", "Paris France", 2 / 3),
    ("x y z", "x", 2 / 4),
    ("The   answer is  Paris.", "Paris", 2 / 4),  # answer, is, paris
    ("a cat sat on the mat", "the cat on a mat", 6 / 7),  # cat sat on mat; cat on mat
    ("red red", "red", 2 / 3),
    ("red red", "red red", 1),
    ("red red blue", "red blue blue", 4 / 6),
    ("blue red", "red blue", 1),
    ("Paris", ("London", "Paris"), 1),
    ("big Paris", ("London", "big red Paris"), 4 / 5),
    ("big Paris", ("big red Paris", "Paris"), 4 / 5),  # the second gives 2 / 3
    ("well-known", "wellknown", 1),
    ("well-known", "well known", 0),
    ("don't", "dont", 1),
    ("U.S.A.", "usa", 1),
    ("snake_case", "snakecase", 1),
    ("1,234.50", "1234.50", 1),
    ("-3", "3", 1),
    ("3.0", "3", 0),  # 30 and 3
    ("A, B", "b", 1),
    ("a-team", "team", 0),  # ateam: punctuation goes before the articles
    ("the-end", "end", 0),
    ("theatre", "atre", 0),
    ("“Paris”", "Paris", 0),  # only ASCII punctuation is deleted
    ("the“Paris”", "“Paris”", 1),
    ("Paris。", "Paris", 0),
    ("café", "cafe", 0),
    ("\n\nParis", "Paris", 1),
    ("Paris\nFrance", "France Paris", 1),
    ("Paris\u00a0France", "Paris France", 1),
]

# words that jieba finds, after punctuation is gone, are in the comments
CHINESE = [
    ("北京", "北京", 1),
    ("北京。", "北京", 1),
    ("", "北京", 0),
    ("北京", "", 0),
    ("。。。", "北京", 0),
    ("……", "北京", 0),
    ("，", "，", 0),
    ("上海", "北京", 0),
    ("北京大学", "北京", 0),  # one word
    ("我来到北京大学", "他来到北京", 2 / 6),  # 我 来到 北京大学; 他 来到 北京
    ("我爱北京天安门", "我爱北京", 6 / 7),  # 我 爱 北京 天安门
    ("我爱北京", "我爱北京天安门", 6 / 7),
    ("中国北京", "北京", 2 / 3),
    ("北京北京", "北京", 2 / 3),
    ("北京北京", "北京北京", 1),
    ("北京北京北京", "北京北京", 4 / 5),
    ("“北京”", "北京", 1),
    ("北京、上海", "上海，北京", 1),
    ("北京 上海", "北京\n上海", 1),
    ("\u3000北京", "北京", 1),
    ("《论语》", "论语", 2 / 3),  # the opening bracket stays a word
    ("《论语》", "《论语》", 1),
    ("〈春〉", "春", 2 / 4),  # both stay
    ("约翰·史密斯", "约翰史密斯", 4 / 5),  # and so does the dot
    ("北京．", "北京", 2 / 3),  # and the full-width stop
    ("北京﹑上海", "北京上海", 4 / 5),  # and the small comma
    ("GPT模型", "gpt模型", 1),
    ("A.B", "ab", 0),  # a b; ab
    ("-3", "3", 1),
    ("1,234.50", "1,234.50", 1),
    ("1,234.50", "1234.50", 0),  # 1 23450; 123450
    ("１２", "12", 0),
    ("1949年10月1日", "1949年", 4 / 8),  # 1949 年 10 月 1 日
    ("北京", ("上海", "北京"), 1),
    ("北京", ("我爱北京", "中国北京"), 2 / 3),
    ("他说：“今天天气很好。”", "今天天气很好", 6 / 8),  # 他 说 今天天气 很 好
    ("今天天气很好。明天下雨。", "明天下雨", 4 / 7),  # 今天天气 很 好 明天 下雨
    ("the cat", "cat", 2 / 3),  # articles are words here
]


@pytest.mark.parametrize(("reply", "answers", "expected"), ENGLISH)
def test_english(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("qa_f1", reply, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("reply", "answers", "expected"), CHINESE)
def test_chinese(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("qa_f1_zh", reply, answers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", ["qa_f1", "qa_f1_zh"])
@given(reply=st.text(max_size=40), answer=st.text(max_size=40))
def test_symmetric_and_bounded(metric: str, reply: str, answer: str) -> None:
    there = score(metric, reply, answer)
    assert 0 <= there <= 1
    assert score(metric, answer, reply) == pytest.approx(there)


@given(words=st.lists(st.sampled_from(["red", "blue", "cat", "12"]), min_size=1, max_size=8), seed=st.randoms())
def test_order_does_not_matter(words: list[str], seed: random.Random) -> None:
    mixed = seed.sample(words, len(words))
    assert score("qa_f1", " ".join(mixed), " ".join(words)) == 1
