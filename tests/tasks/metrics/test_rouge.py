"""ROUGE-L. Expected values are 2u / (n + m): u words of the union of longest common subsequences, n and m distinct
words of reply and answer. The package adds 1e-8 to a denominator: hence the tolerance.
"""

from __future__ import annotations

import jieba
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge import Rouge

from tests.tasks.metrics.scoring import score

CLOSE = 1e-7
ENGLISH = [
    ("the cat", "the cat", 1),
    ("", "cat", 0),
    ("cat", "", 0),
    (".", "cat", 0),
    ("...", "cat", 0),
    (" ", "cat", 0),
    ("cat", "dog", 0),
    ("Cat", "cat", 0),
    ("cat,", "cat", 0),
    ("“cat”", "cat", 0),
    ("-3", "3", 0),
    ("cat.", "cat", 1),
    (". cat", "cat", 1),
    ("cat\nsat", "cat sat", 1),
    ("cat  sat", "cat sat", 1),
    ("\n\ncat", "cat", 1),
    ("the cat sat", "the cat", 4 / 5),
    ("cat the", "the cat", 2 / 4),
    ("c b a", "a b c", 2 / 6),
    ("a b c d", "a c", 4 / 6),
    ("a c", "a b c d", 4 / 6),
    ("a x b y c", "a b c", 6 / 8),
    ("cat cat cat", "cat", 1),  # words count once
    ("cat cat", "cat dog", 2 / 3),
    ("a a b", "a b b", 1),
    ("a. a. a", "a", 1),
    ("cat", ("dog", "cat"), 1),
    ("the cat", ("the cat sat on", "dog"), 4 / 6),
    ("A cat. A dog.", "A cat. A dog.", 1),
    ("A dog. A cat.", "A cat. A dog.", 1),  # the order of sentences does not matter
    ("A dog A cat", "A cat A dog", 4 / 6),  # within a sentence it does
    ("cat . dog", "cat dog", 1),
    ("3.5", "5.3", 1),  # the sentences 3 and 5
    ("U.S. economy", "US economy", 2 / 5),
    ("1,234.50", "1,234.50", 1),
    ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 8 / 13),  # union w1 w2 w3 w5; 8 and 5 distinct words
    ("\n", "a. ", 2 / 3),  # the blank after the full stop is an empty word, and so is a blank reply
    ("caf\u00e9", "cafe\u0301", 0),
    ("我爱北京", "我爱上海", 0),  # one word each
    ("猫 狗。鸟", "猫 狗 鸟", 2 / 5),
]

CHINESE = [
    ("北京", "北京", 1),
    ("", "北京", 0),
    ("北京", "", 0),
    (".", "北京", 0),
    ("。", "北京", 0),
    ("\n", "北京", 0),
    ("上海", "北京", 0),
    ("北京大学", "北京", 0),  # one word
    ("北京。", "北京", 2 / 3),  # punctuation is a word
    ("。", "北京。", 2 / 3),
    ("“北京”", "北京", 2 / 4),
    ("《论语》", "论语", 2 / 4),
    ("约翰·史密斯", "约翰史密斯", 4 / 5),
    ("……", "…", 1),
    ("好好学习", "好好学习", 1),
    ("我爱北京天安门", "我爱北京", 6 / 7),  # 我 爱 北京 天安门
    ("我爱北京", "我爱北京天安门", 6 / 7),
    ("北京上海", "上海北京", 2 / 4),
    ("北京，上海", "上海，北京", 2 / 6),
    ("北京北京", "北京", 1),
    ("北京 上海", "北京上海", 1),
    ("北京\n上海", "北京上海", 1),
    ("\u3000北京", "北京", 1),
    ("我来到北京大学", "他来到北京", 2 / 6),
    ("GPT模型", "gpt模型", 2 / 4),
    ("the cat", "the cat", 1),
    ("3.14", "14.3", 1),  # full stops end sentences in numbers, too
    ("１２", "12", 0),
    ("1949年10月1日", "1949年", 4 / 8),
    ("北京", ("上海", "北京"), 1),
    ("我爱北京", ("我爱北京天安门", "上海"), 6 / 7),
    ("今天天气很好。明天下雨。", "今天天气很好。", 8 / 10),  # 今天天气 很 好 。 明天 下雨
    ("明天下雨。今天天气很好。", "今天天气很好。明天下雨。", 8 / 12),  # one sentence each
    ("明天下雨.今天天气很好.", "今天天气很好.明天下雨.", 1),  # two sentences each
    ("他说：“今天天气很好。”", "今天天气很好", 6 / 12),  # 他 说 ： “ 今天天气 很 好 。 ”
]


@pytest.mark.parametrize(("reply", "answers", "expected"), ENGLISH)
def test_english(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("rouge_l", reply, answers) == pytest.approx(expected, abs=CLOSE)


@pytest.mark.parametrize(("reply", "answers", "expected"), CHINESE)
def test_chinese(reply: str, answers: str | tuple[str, ...], expected: float) -> None:
    assert score("rouge_l_zh", reply, answers) == pytest.approx(expected, abs=CLOSE)


def official(reply: str, answer: str) -> float:
    """What the package says of all its metrics at once, averaged over one pair, as LongBench asks it."""
    try:
        return float(Rouge().get_scores([reply], [answer], avg=True)["rouge-l"]["f"])
    except ValueError:
        return 0.0


WORDS = st.lists(st.sampled_from(["a", "b", "c", "A", ".", "d.", "\n", "x,", "3.5"]), max_size=12).map(" ".join)
HAN = st.text(st.sampled_from("我是中国人，。！《论语》 \n.3a北京大学"), max_size=25)


@given(reply=WORDS, answer=WORDS)
def test_the_package_is_the_definition(reply: str, answer: str) -> None:
    assert score("rouge_l", reply, answer) == official(reply, answer)


@given(reply=HAN, answer=HAN)
def test_the_package_on_words_of_jieba(reply: str, answer: str) -> None:
    spaced = [" ".join(jieba.cut(text, cut_all=False)) for text in (reply, answer)]
    assert score("rouge_l_zh", reply, answer) == official(*spaced)


def long_reply(words: int) -> str:
    """A sentence of so many words, and then the answer "y"."""
    return " ".join(f"x{index}" for index in range(words)) + ". y"


@pytest.mark.parametrize(("words", "expected"), [(900, 2 / 902), (1100, 0)])
def test_too_long_a_sentence_scores_nothing(words: int, expected: float) -> None:
    assert score("rouge_l", long_reply(words), "y") == pytest.approx(expected, abs=CLOSE)


def test_the_depth_of_the_caller_does_not_matter() -> None:
    def nested(levels: int) -> float:
        return nested(levels - 1) if levels else score("rouge_l", long_reply(900), "y")

    assert nested(500) == pytest.approx(2 / 902, abs=CLOSE)
