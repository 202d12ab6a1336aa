"""Scores of LongBench and InfiniteBench: words in common, classes, numbers, choices, a line of code.

The score of a reply is the best over the references, in [0, 1]; tables multiply the mean by 100. Sources: LongBench,
arXiv 2308.14508, `metrics.py` and `eval.py`; InfiniteBench (Zhang et al., arXiv 2402.13718), `compute_scores.py` in its
last version, which looks for the last single letter in replies to multiple choice; the first ones looked at a reply's
first letter only. Its En.Dia is scored by `contains`, En.QA by `qa_f1`.
"""

from __future__ import annotations

import re
import string
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvsearch.core.errors import UsageError
from kvsearch.tasks.metrics.packages import import_optional, make_rouge_scorer

if TYPE_CHECKING:
    from kvsearch.tasks.base import Query

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# as in the official scorer, which strips the closing one of the brackets 《》 only, and none of 〈〉
_CHINESE_PUNCTUATION = "、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿" + "–—‘’‛“”„‟…‧﹏"
_FULL_WIDTH = "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"
_NO_ASCII = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION + _FULL_WIDTH)
_NUMBER = re.compile(r"\d+")
_CHOSEN = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))
_COMMENT = ("`", "#", "//")


def take_first_line(reply: str) -> str:
    """Cut what LongBench scores from a reply to trec, triviaqa, samsum and lsht: its first line after leading newlines.

    Only newlines are stripped, as in the official `eval.py`: a first line of blanks is kept. (kvpress strips all white
    space there.) The other datasets are scored on the whole reply.
    """
    return reply.lstrip("\n").split("\n")[0]


def qa_f1(reply: str, answers: Sequence[str]) -> float:
    """Return F1 of the words of reply and answer, counted with their multiplicity.

    Before, texts are lowered, ASCII punctuation is deleted (not replaced: "well-known" is one word), and then the words
    a, an and the. Other punctuation stays part of its word. 0 if either has no words left.
    Tables: narrativeqa, qasper, multifieldqa_en, hotpotqa, 2wikimqa, musique, triviaqa.
    """
    words = _split_english(reply)
    return max(_compute_f1(words, _split_english(answer)) for answer in answers)


def qa_f1_zh(reply: str, answers: Sequence[str]) -> float:
    """Return F1 of the words that jieba cuts reply and answer into, counted with their multiplicity.

    Words are lowered after they were cut, and lose punctuation (ASCII and Chinese) and white space; empty ones are
    dropped. Tables: multifieldqa_zh. EnvironmentFault without jieba.
    """
    words = _split_chinese(reply)
    return max(_compute_f1(words, _split_chinese(answer)) for answer in answers)


def rouge_l(reply: str, answers: Sequence[str]) -> float:
    """Return F of ROUGE-L (summary level) as the package `rouge` 1.0.1 computes it; not that of `rouge-score`.

    Sentences end at every full stop, words are told apart by white space, case and punctuation count. The union of the
    longest common subsequences is over distinct words, and so are the lengths. 1e-8 in the denominator keeps a perfect
    reply below 1. Where the package fails, the score is 0, as in the official scorer: for a reply of nothing but full
    stops, and where a pair of sentences has so many words (about a thousand together) that its recursion is too deep.
    Tables: gov_report, qmsum, multi_news, samsum. EnvironmentFault without the package.
    """
    return max(_score_rouge(reply, answer) for answer in answers)


def rouge_l_zh(reply: str, answers: Sequence[str]) -> float:
    """Score as `rouge_l`, by the words that jieba cuts reply and answer into, punctuation included.

    Chinese full stops end no sentence. Tables: dureader, vcsum. EnvironmentFault without the packages.
    """
    spaced = _join_with_spaces(reply)
    return max(_score_rouge(spaced, _join_with_spaces(answer)) for answer in answers)


def _compute_f1(words: Sequence[str], wanted: Sequence[str]) -> float:
    """Return F1 of two bags of words, 0 where they have none in common."""
    common = (Counter(words) & Counter(wanted)).total()
    if not common:
        return 0.0
    precision = common / len(words)
    recall = common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def classification(reply: str, query: Query) -> float:
    """Return 1/n if the answer is among the n classes (`query.options`) that occur in the reply, else 0.

    A class that is part of the answer's own name does not count as another class ("Group" beside "Group or
    organization"). The official loop removes those from the list it iterates over, and so skips the class after each
    removed one: of two such classes in a row, the second stays and lowers the score. That is reproduced here, because
    all published numbers have it; without the defect the score is never lower.
    Tables: trec and lsht, on `take_first_line`. UsageError if there are no options.
    """
    if not query.options:
        raise UsageError("the metric classification needs all classes of the task as options of the question")
    return max(_score_classes(reply, answer, query.options) for answer in query.answers)


def retrieval(reply: str, answers: Sequence[str]) -> float:
    """Share of the integers in the reply that are the paragraph's, as written; the answer is "Paragraph 12".

    Tables: passage_retrieval_en. UsageError if an answer names no paragraph.
    """
    return max(_score_numbers(reply, _read_paragraph_number(answer, "Paragraph ")) for answer in answers)


def retrieval_zh(reply: str, answers: Sequence[str]) -> float:
    """Score as `retrieval`, with answers such as "段落12". Tables: passage_retrieval_zh."""
    return max(_score_numbers(reply, _read_paragraph_number(answer, "段落")) for answer in answers)


def count(reply: str, answers: Sequence[str]) -> float:
    """Share of the integers in the reply that are the answer, as written ("07" is not "7"). Tables: passage_count."""
    return max(_score_numbers(reply, answer) for answer in answers)


def edit_similarity(reply: str, answers: Sequence[str]) -> float:
    """Compare the reply's first line of code with the answer, in whole percent: 1 - (insertions + deletions) / T.

    T is the number of characters of both; a substitution counts as a deletion and an insertion. The line is the first
    without a backtick, # or //, or empty. This is `fuzz.ratio` of fuzzywuzzy with python-Levenshtein installed, of
    thefuzz and of rapidfuzz, rounded half to even; 1 for two empty texts, 0 if only one is empty. LongBench does not
    say whether python-Levenshtein is to be installed: KVCache-Factory (PyramidKV) requires it. Without it, fuzzywuzzy
    computes another ratio, which is never higher, so numbers of the two kinds do not compare.
    Tables: lcc, repobench-p. EnvironmentFault without rapidfuzz.
    """
    lines = reply.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in _COMMENT)), "")
    best: float = max(import_optional("rapidfuzz.fuzz").ratio(line, answer) for answer in answers)
    return round(best) / 100


def longbench_v2(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the reply says "The correct answer is (A)" with the letter that is right; brackets may be missing.

    The first such sentence with brackets counts, else the first without; asterisks are left out. Tables: LongBench v2
    (arXiv 2412.15204).
    """
    text = reply.replace("*", "")
    chosen = next(filter(None, (pattern.search(text) for pattern in _CHOSEN)), None)
    return float(chosen is not None and chosen[1] in answers)


def _score_classes(reply: str, answer: str, classes: Sequence[str]) -> float:
    classes_named = [name for name in classes if name in reply]
    place = 0
    while place < len(classes_named):
        if classes_named[place] != answer and classes_named[place] in answer:
            del classes_named[place]
        place += 1  # also after a removal: what moved up into its place is skipped
    return 1 / len(classes_named) if answer in classes_named else 0.0


def _score_numbers(reply: str, wanted: str) -> float:
    numbers = _NUMBER.findall(reply)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def _read_paragraph_number(answer: str, before: str) -> str:
    match = re.search(rf"{before}(\d+)", answer)
    if not match:
        raise UsageError(f"the answer {answer!r} names no paragraph: it must contain {before + '12'!r} or the like")
    return match[1]


def _split_english(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_ASCII)).split()


def _split_chinese(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_NO_PUNCTUATION).split()) for word in import_optional("jieba").cut(text))
    return [word for word in words if word]


def _join_with_spaces(text: str) -> str:
    return " ".join(import_optional("jieba").cut(text))


def _score_rouge(reply: str, answer: str) -> float:
    score = import_optional("rouge").Rouge(metrics=["rouge-l"], stats=["f"]).get_scores

    def scored() -> float:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(1000)  # Python's own, which torch.compile raises
        try:
            return float(score(reply, answer)[0]["rouge-l"]["f"])
        except (ValueError, RecursionError):
            return 0.0
        finally:
            sys.setrecursionlimit(limit)

    # in a thread of its own: how deep the package may recurse must not depend on how deep its caller is
    with ThreadPoolExecutor(max_workers=1) as fresh:
        return fresh.submit(scored).result()


# --- InfiniteBench ---------------------------------------------------------------------------------------------------

LETTERS = "ABCD"
_LAST_OF_FOUR, _LAST_OF_TEN = (re.compile(rf"\b[A-{end}]\b(?!.*\b[A-{end}]\b)") for end in "DJ")
_DECIMAL = re.compile(r"\d+\.\d+|\d+")
_MARKS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
_CHOICE_MARKS = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))
_CODE_MARKS = str.maketrans(dict.fromkeys("\n`'\"-*", " "))
_CHOICE_CUES = ("answer is:", "answer:", "answer is", "option is")
_CODE_CUES = ("answer is:", "is:", "answer:", "correct option is:")


def first_integer(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the first run of digits in the reply is an answer, as written. Tables: passkey, number_string."""
    match = re.search(r"[0-9]+", reply)
    return float(match is not None and match[0] in answers)


def contains_word(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if an answer is one of the reply's words, which end at white space and punctuation.

    Tables: kv_retrieval.
    """
    words = reply.translate(_MARKS).split()
    return float(any(answer in words for answer in answers))


def first_number(reply: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number in the reply, a whole or a decimal one without sign, equals an answer.

    Tables: math_find. UsageError if an answer is no number. (The official scorer fails on a decimal where a whole
    number is wanted; here it is a wrong reply.)
    """
    match = _DECIMAL.search(reply)
    return float(match is not None and any(float(match[0]) == _as_number(answer) for answer in answers))


def choice(reply: str, query: Query) -> float:
    """Return 1 if the reply chooses the answer, one of the texts in `query.options`, by its letter A to D or its text.

    The last letter that stands alone decides if it is right; else the reply's first letter, the reply as a whole, what
    follows a cue such as "answer is:", the first word that is a letter, in this order. Tables: longbook_choice_eng.
    UsageError unless the answers are of two to four options.
    """
    labels = _list_right_replies(query)
    text = reply.strip()
    if not text:
        return 0.0
    if _find_letter(_LAST_OF_FOUR, text) in labels:
        return 1.0
    if text[0] in LETTERS:
        return float(text[0] in labels)
    if text in labels:
        return 1.0
    text = _single_spaced(text.translate(_CHOICE_MARKS))
    after = _take_after_cue(text, _CHOICE_CUES)
    if after is not None:
        return float(after.startswith(labels))
    return float(next((word for word in text.split() if word in LETTERS), None) in labels)


def choice_of_function(reply: str, query: Query) -> float:
    """Score as `choice`, where the options are names of functions. Tables: code_debug.

    The last letter from A to J that stands alone decides if it is right; else the reply, without quotes and the word
    option, has to begin with letter or name, or to have them after a cue.
    """
    labels = _list_right_replies(query)
    if _find_letter(_LAST_OF_TEN, reply.strip()) in labels:
        return 1.0
    text = re.sub("[Oo]ption", " ", reply.strip().translate(_CODE_MARKS))
    text = _single_spaced(text)
    if text.startswith(labels):
        return 1.0
    after = _take_after_cue(text, _CODE_CUES)
    return float(after is not None and after.startswith(labels))


def character_f1_zh(reply: str, answers: Sequence[str]) -> float:
    """Return F1 of the characters of reply and answer, without punctuation and white space; the best of the answers.

    Tables: longbook_qa_chn. LongBench counts the words of jieba instead.
    """
    characters = _characters(reply)
    return max(_compute_f1(characters, _characters(answer)) for answer in answers)


def rouge_l_sum(reply: str, answers: Sequence[str]) -> float:
    """Return F of ROUGE-Lsum, sentences at newlines, without stemming, by the package `rouge-score`; the best one.

    Tables: longbook_sum_eng. EnvironmentFault without the package.
    """
    scorer = make_rouge_scorer("rougeLsum", stems=False)
    return max(float(scorer.score(answer, reply)["rougeLsum"].fmeasure) for answer in answers)


def _list_right_replies(query: Query) -> tuple[str, ...]:
    """Return what is right to reply: the answers' texts and their letters."""
    options = query.options
    if not 2 <= len(options) <= len(LETTERS) or not set(query.answers) <= set(options):
        raise UsageError(f"the answer must be one of 2 to {len(LETTERS)} options, got {', '.join(query.answers)}")
    return (*query.answers, *(LETTERS[options.index(answer)] for answer in query.answers))


def _find_letter(letter: re.Pattern[str], text: str) -> str | None:
    match = letter.search(text)  # the last one of the first line that has any
    return match and match[0]


def _take_after_cue(text: str, cues: Sequence[str]) -> str | None:
    """Return what follows the first of `cues` that is there, and one more character; None without a cue."""
    for cue in cues:
        _, separator, after = text.partition(cue)
        if separator:
            return after[1:]
    return None


def _single_spaced(text: str) -> str:
    return re.sub(" {2,}", " ", text)


def _as_number(answer: str) -> float:
    try:
        return float(answer)
    except ValueError:
        raise UsageError(f"the answer {answer!r} is not a number") from None


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(_NO_PUNCTUATION).split()))
