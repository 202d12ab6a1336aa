"""The 13 tasks of RULER, generated for any tokenizer and any length, and its multiquery in turns (SCBench's setting).

The benchmark is that of "RULER: What's the Real Context Size of Your Long-Context Language Models?" (Hsieh et al.,
2024). What equals the official data:

- the tasks, their names, their structure and their difficulty: kinds and numbers of needles, keys, values and queries;
  one chain of four hops (vt); ten common words, 30 against 3 times, and below 4096 tokens 6 against once (cwe); coded
  words whose counts fall with the square of their rank, rank 1 being dots that do not count (fwe); paragraphs of
  other questions around the paragraphs of the question (qa_1: SQuAD, qa_2: HotpotQA);
- needles in an essay lie between sentences, at 40 evenly spaced depths; worked examples come before the list of cwe
  and the text of vt (there of at most 500 tokens, with variables of three letters);
- tokens to generate, the metrics, and that context, question, start of the reply and tokens to generate together have
  at most `length` tokens. A chat template's own and special tokens come on top.

What differs, so that scores may be compared with each other but not with published ones:

- the wording of instructions, needles, filler and questions is our own, and so are the word lists. Where cwe needs
  more words than they hold, nouns are joined in pairs;
- the essay haystack is the story that kvsearch also calibrates on, from its beginning and repeated where it is too
  short, or a text file of yours (`haystack`): take one to keep calibration and evaluation apart;
- contexts are filled to within about two percent, not in large steps, and every example on its own. vt's example takes
  at most a quarter of `length`, so that short lengths are possible;
- depths are dealt, not drawn: 40 / needles examples in a row use every depth once. Noise, needles and vt have the
  same 40 depths as essays, where the official data takes any place;
- nothing repeats by accident: no key, value or variable occurs twice or in the haystack, no common word is part of
  another word of its list, and the three most frequent coded words are three. qa alone keeps distractors as they are,
  and some may hold an answer too;
- there are splits: "train", "select" and "report" share no example, and do not ask about the same paragraph of a qa
  file. "all" is the whole file, and one more set of examples for the other tasks.
"""

from __future__ import annotations

from kvsearch.tasks.ruler.task import RULER_TASKS, DrawnRulerTask, RulerTask

__all__ = ["RULER_TASKS", "DrawnRulerTask", "RulerTask"]
