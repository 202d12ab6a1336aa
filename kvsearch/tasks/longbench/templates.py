"""LongBench's prompts: instruction, context, question and cue. The wording is ours, a user may give the official one.

The instruction comes before the context and again after it, so that a model that has seen a long text still knows what
to do. Few-shot prompts end as their examples do, in what the rows hold.
"""

from __future__ import annotations

_PASSAGES = (
    "Use the passages below to answer a question. Reply with the answer and nothing else.\n\nPassages:\n{context}\n\n"
    "Use the passages above to answer this question. Reply with the answer and nothing else.\n\n"
    "Question: {input}\nAnswer:"
)
_STORY = "Be as brief as you can, one phrase if that is enough, and give no reasons."
_PAPER = (
    'Be as brief as you can, one phrase or sentence if that is enough, and give no reasons. Reply "unanswerable" if '
    'the paper does not hold the answer, and to yes/no questions reply "yes", "no" or "unanswerable".'
)
TEMPLATES: dict[str, str] = {
    "narrativeqa": (
        f"Here is a story, from a novel or a film script, and a question about it. {_STORY}\n\nStory: {{context}}\n\n"
        f"Answer the question about the story. {_STORY}\n\nQuestion: {{input}}\n\nAnswer:"
    ),
    "qasper": (
        f"Here is a scientific paper and a question about it. {_PAPER}\n\nPaper: {{context}}\n\n"
        f"Answer the question about the paper. {_PAPER}\n\nQuestion: {{input}}\n\nAnswer:"
    ),
    "multifieldqa_en": (
        "Here is a text. A question about it follows.\n\n{context}\n\n"
        "Answer this question about the text in a few words. Reply with the answer and nothing else.\n\n"
        "Question: {input}\nAnswer:"
    ),
    "multifieldqa_zh": (
        "下面是一篇文章，请读完后用中文简要作答。\n\n{context}\n\n"
        "请根据这篇文章回答问题，除答案本身外什么都不要写。\n\n问题：{input}\n答案："
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": (
        "下面是若干篇文章和一个问题，请依据文章作答。\n\n文章：{context}\n\n请依据以上文章作答。\n\n问题：{input}\n答案："
    ),
    "gov_report": (
        "Here is a government report. Summarise it on about one page.\n\nReport:\n{context}\n\n"
        "Summarise the report on about one page.\n\nSummary:"
    ),
    "qmsum": (
        "Here is the transcript of a meeting and a request about it. Reply in a few sentences.\n\n"
        "Transcript:\n{context}\n\nReply to this request about the meeting in a few sentences.\n\n"
        "Request: {input}\nReply:"
    ),
    "multi_news": (
        "Here are several news articles. Summarise all of them together on about one page.\n\nArticles:\n{context}\n\n"
        "Summarise all articles together on about one page.\n\nSummary:"
    ),
    "vcsum": "请阅读下面的会议记录，然后概括会议的主要内容。\n会议记录：\n{context}\n\n内容概要：",
    "trec": "Each question below is followed by its type. Give the type of the last one.\n\n{context}\n{input}",
    "triviaqa": (
        "Answer the last question from its passage, as the examples before it do. Reply with the answer and nothing "
        "else.\n\n{context}\n\n{input}"
    ),
    "samsum": "Sum up the last dialogue in a sentence or two, as the examples before it do.\n\n{context}\n\n{input}",
    "lsht": "下面每条新闻后面都标有它的类别，请写出最后一条新闻的类别。\n\n{context}\n{input}",
    "passage_count": (
        "Below are paragraphs from Wikipedia, some of them more than once. Count the different ones: a paragraph that "
        "is repeated counts once.\n\n{context}\n\n"
        "How many different paragraphs are there? Reply with a number only, such as 7.\n\nNumber: "
    ),
    "passage_retrieval_en": (
        "Below are 30 numbered paragraphs from Wikipedia, and then a summary of one of them. Find that paragraph.\n\n"
        "{context}\n\nSummary:\n\n{input}\n\n"
        "Which paragraph is this a summary of? Reply in the form \"Paragraph 7\".\n\nReply: "
    ),
    "passage_retrieval_zh": (
        "下面有一些带编号的段落，之后是其中某一段的概要。请找出这一段。\n\n{context}\n\n概要：\n\n{input}\n\n"
        "这是哪一段的概要？请按“段落7”的形式作答。\n\n段落编号："
    ),
    "lcc": "Continue this code by one line.\n{context}The line that follows:\n",
    "repobench-p": "Continue the last file of this code by one line.\n{context}{input}The line that follows:\n",
}  # fmt: skip
