"""InfiniteBench's datasets with their settings and prompts: the ten that KV-cache eviction is measured on.

Left out are math_calc and code_run, which no table on eviction has. The wording of the prompts is
ours, a user may give the official one; what rows hold as their question is the official text.
"""

from __future__ import annotations

from dataclasses import dataclass

RETRIEVAL, NOVEL, DIALOGUE = "InfiniteBench retrieval", "InfiniteBench novel", "InfiniteBench dialogue"
MATH, CODE = "InfiniteBench math", "InfiniteBench code"


@dataclass(frozen=True)
class Spec:
    """Settings of one dataset; `options` says that its questions have answers to choose from, A to D."""

    category: str
    metric: str
    max_new_tokens: int
    options: bool = False


SPECS: dict[str, Spec] = {
    "passkey": Spec(RETRIEVAL, "first_integer", 6),
    "number_string": Spec(RETRIEVAL, "first_integer", 12),
    "kv_retrieval": Spec(RETRIEVAL, "contains_word", 50),
    "longbook_sum_eng": Spec(NOVEL, "rouge_l_sum", 1200),
    "longbook_choice_eng": Spec(NOVEL, "choice", 40, options=True),
    "longbook_qa_eng": Spec(NOVEL, "qa_f1", 40),
    "longbook_qa_chn": Spec(NOVEL, "character_f1_zh", 40),
    "longdialogue_qa_eng": Spec(DIALOGUE, "contains", 40),
    "math_find": Spec(MATH, "first_number", 3),
    "code_debug": Spec(CODE, "choice_of_function", 5, options=True),
}

INFINITEBENCH_TASKS = tuple(SPECS)
INFINITEBENCH_LAVA = ("longbook_sum_eng", "longbook_choice_eng", "longdialogue_qa_eng")  # LAVa, Table 12

_HIDDEN = "A fact is hidden in the long text below. Find it and keep it in mind: you will be asked for it."
TEMPLATES: dict[str, str] = {
    "passkey": f"{_HIDDEN}\n\n{{context}}\n\n{{input}}\n\nThe pass key is",
    "number_string": f"{_HIDDEN}\n\n{{context}}\n\n{{input}}\n\nThe sequence of digits is",
    "kv_retrieval": "Look up the value of one key in this JSON object.\n\n{context}\n\n{input}",
    "longbook_sum_eng": "Summarise the book below.\n\n{context}\n\nSummary:",
    "longbook_choice_eng": (
        "Read the book below and choose the answer to a question about it.\n\n{context}\n\n"
        "Question: {input}\n\nThe letter of the right answer is"
    ),
    "longbook_qa_eng": (
        "Read the book below and answer a question about it in as few words as you can.\n\n{context}\n\n"
        "Question: {input}\nAnswer:"
    ),
    "longbook_qa_chn": "请阅读下面的书，然后尽量简短地回答问题。\n\n{context}\n\n问题：{input}\n答案：",
    "longdialogue_qa_eng": (
        'In the script below the name of one character was replaced by "$$MASK$$" in one place. Find out whose it is.'
        '\n\n{context}\n\nThe name that was replaced by "$$MASK$$" is most likely'
    ),
    "math_find": "Find a number in the list below.\n\n{context}\n\n{input}",
    "code_debug": (
        "Exactly one function in the Python code below has an error that was put there and makes it crash.\n\n"
        "{context}\n\n{input}\n\nThe letter of the function with the error is"
    ),
}
