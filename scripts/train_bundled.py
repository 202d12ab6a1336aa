"""Train the bundled models on a CPU:  python scripts/train_bundled.py --out DIR --minutes 60 [--redundant]

Three things make a tiny model learn long-context recall within an hour on two cores:

1. Associative recall first, on two layers: `k v k v ... k v` with every answer supervised. The phase change (loss
   falls off a cliff) comes within a minute. Two heads of layer 0 start out looking one and two tokens back.
2. Then grow without forgetting: query heads are duplicated over the same kv heads, new layers write nothing at first.
3. Then the real language, short and dense at first; the context grows whenever the model answers nine in ten.

`--redundant` goes on from the bundled model instead, and spreads its retrieval over three layers that can stand in for
each other: the attention of the layer that retrieves replaces that of the two layers after it, and then the rows of
questions and answers see nothing of the context in up to two of the three layers, drawn anew for every document.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvsearch.core.resources import find_resource
from kvsearch.tasks.synthetic import language as v
from kvsearch.tasks.synthetic.language import (
    Document,
    Evidence,
    Names,
    compose_document,
    make_chains,
    make_code_facts,
    make_code_pairs,
    make_item_facts,
    make_query,
    make_votes,
)  # fmt: skip

# tasks by the word that their questions begin with
ASKED = {
    "code": "multikey",
    "both": "multiquery",
    "item": "multivalue",
    "set": "chain",
    "vote": "vote",
    "bell": "count",
}
TOKEN_ID = {word: index for index, word in enumerate(v.WORDS)}
HEAD_DIM = 16
CONTEXTS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
TOKENS_PER_STEP = 4096
PASS_MARK = 0.9
TEXT_WEIGHT, ANSWER_WEIGHT = 0.1, 1.0
RETRIEVING = 3  # layers of the redundant model that retrieve
HIDDEN_IN = (0, 1, 2, 2)  # of that many of them the context is hidden, one drawn for every document


def tokenizer() -> Any:
    """Return a fast tokenizer that splits at white space and puts `<bos>` in front; unknown words become `<unk>`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(dict(TOKEN_ID), unk_token=v.UNK))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single=f"{v.BOS} $A", special_tokens=[(v.BOS, TOKEN_ID[v.BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=v.PAD,
        bos_token=v.BOS,
        eos_token=v.EOS,
        unk_token=v.UNK,
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


class Batch(NamedTuple):
    ids: Tensor  # [B, T] token ids, padded on the right
    weight: Tensor  # [B, T] loss weight of predicting each token
    context: Tensor  # [B] tokens before the first question


class Hidden(NamedTuple):
    """What the tokens after a context do not see of it: all but its first and last entries, in some layers."""

    layers: Mapping[int, Tensor]  # by layer for which documents, [B] bool
    first: Tensor  # [B] entries at the start of the context that are seen
    last: Tensor  # [B] entries at its end that are seen


def bells(count: int) -> Evidence:
    """Strike a bell `count` times, 1 to 6; the question asks how often (word counting)."""
    return Evidence((("bell", "."),) * count, (make_query(("?", "bell"), (v.NUMBERS[count - 1], ".")),))


def build(layers: int, heads: int, kv_heads: int, hidden: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(v.WORDS), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=HEAD_DIM, initializer_range=0.1,
            max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False, attention_bias=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def seed_previous_token_heads(model: LlamaForCausalLM, offsets: dict[int, int], amplitude: float = 2.5) -> None:
    """Bias head h of layer 0 towards the token `offsets[h]` positions back (through the rotary phase)."""
    attention = model.model.layers[0].self_attn
    half = HEAD_DIM // 2
    theta = 10000.0 ** (-torch.arange(half) / half)
    with torch.no_grad():
        for head, offset in offsets.items():
            rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
            key, query = torch.zeros(HEAD_DIM), torch.zeros(HEAD_DIM)
            key[:half] = amplitude
            query[:half], query[half:] = amplitude * torch.cos(theta * offset), -amplitude * torch.sin(theta * offset)
            attention.q_proj.bias[rows], attention.k_proj.bias[rows] = query, key
            attention.q_proj.weight[rows] *= 0.1
            attention.k_proj.weight[rows] *= 0.1


def grow(small: LlamaForCausalLM, layers: int, hidden: int) -> LlamaForCausalLM:
    """Grow to two query heads per kv head and `layers` layers that compute (almost) what the two-layer model did."""
    heads = small.config.num_attention_heads
    large = build(layers, 2 * heads, heads, hidden)
    old, new = small.state_dict(), large.state_dict()
    places = (0, layers // 2)
    for name, tensor in old.items():
        if ".layers." in name:
            index = int(name.split(".layers.")[1].split(".")[0])
            name = name.replace(f".layers.{index}.", f".layers.{places[index]}.")
        if "q_proj" in name:
            tensor = tensor.view(heads, HEAD_DIM, *tensor.shape[1:]).repeat_interleave(2, 0).flatten(0, 1)
            tensor = tensor + 0.01 * torch.randn_like(tensor)
        elif "o_proj.weight" in name:
            tensor = tensor.view(-1, heads, HEAD_DIM).repeat_interleave(2, 1).flatten(1) / 2
        new[name] = tensor
    for index in set(range(layers)) - set(places):
        for part in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            new[f"model.layers.{index}.{part}"].zero_()
    large.load_state_dict(new)
    return large


def recall_batch(rng: np.random.Generator, rows: int, pairs: int, queries: int, names: int) -> Batch:
    """Make a batch of associative recall: `k v` pairs, then queries `k v` with every `v` supervised."""
    keys = np.array([TOKEN_ID[word] for word in v.KEYS])[np.argsort(rng.random((rows, names)), 1)[:, :pairs]]
    values = np.array([TOKEN_ID[word] for word in v.VALUES])[rng.integers(0, names, (rows, pairs))]
    asked = rng.integers(0, pairs, (rows, queries))
    ids = np.full((rows, 1 + 2 * pairs + 2 * queries), TOKEN_ID[v.BOS])
    weight = np.zeros(ids.shape, dtype=np.float32)
    ids[:, 1 : 1 + 2 * pairs : 2], ids[:, 2 : 2 + 2 * pairs : 2] = keys, values
    ids[:, 1 + 2 * pairs :: 2] = np.take_along_axis(keys, asked, 1)
    ids[:, 2 + 2 * pairs :: 2] = np.take_along_axis(values, asked, 1)
    weight[:, 2 + 2 * pairs :: 2] = ANSWER_WEIGHT
    return Batch(torch.tensor(ids), torch.tensor(weight), torch.full((rows,), 1 + 2 * pairs))


def training_document(rng: random.Random, length: int) -> Document:
    """Return a random mixture of all kinds of evidence, from sparse to one third of the words."""
    names = Names(rng)
    room = int(length * rng.choice((0.05, 0.1, 0.2, 0.33))) + 12
    makers = [
        lambda: make_code_facts(rng, names, rng.randint(1, 4)),
        lambda: make_code_pairs(rng, names, rng.randint(2, 4)),
        lambda: make_item_facts(rng, names, 1),
        lambda: make_chains(rng, names, 1),
    ]
    needles = []
    if rng.random() < 0.5:
        needles.append(make_votes(rng, rng.randint(3, 10), rng.randint(2, 4)))
    if rng.random() < 0.5:
        needles.append(bells(rng.randint(1, 6)))
    room -= sum(group.tokens for group in needles)
    for _ in range(14):
        if names.count_left("key", v.KEYS) < 4 or names.count_left("variable", v.VARIABLES) < 3:
            break
        group = rng.choice(makers)()
        if group.tokens <= room:
            needles.append(group)
            room -= group.tokens
    return compose_document(rng, length, needles, mentions=rng.randint(0, 4), tail_mentions=rng.randint(0, 2))


def encode(document: Document, questions: int) -> tuple[list[int], list[float], list[tuple[str, int, int]]]:
    """Return the token ids, loss weights and the (task, start, end) of every answer, questions one after another."""
    words, weight = list(document.words), [TEXT_WEIGHT] * len(document.words)
    spans = []
    for question in document.questions[:questions]:
        asked, answer = question.question.split(), question.answers[0].split()
        words += asked
        spans.append((ASKED[asked[1]], len(words), len(words) + len(answer)))
        words += answer
        weight += [TEXT_WEIGHT] * len(asked) + [ANSWER_WEIGHT] * len(answer)
    return [TOKEN_ID[word] for word in words], weight, spans


def document_batch(rng: random.Random, length: int, questions: int) -> Batch:
    documents = [training_document(rng, length) for _ in range(max(4, TOKENS_PER_STEP // (length + 40)))]
    rows, encoded = len(documents), [encode(document, questions) for document in documents]
    width = max(len(ids) for ids, _, _ in encoded)
    ids, weight = torch.zeros(rows, width, dtype=torch.long), torch.zeros(rows, width)
    for row, (tokens, weights, _) in enumerate(encoded):
        ids[row, : len(tokens)], weight[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(weights)
    return Batch(ids, weight, torch.tensor([len(document.words) for document in documents]))


def spread(model: LlamaForCausalLM, layer: int) -> range:
    """Let the layers after `layer` retrieve as it does, each with its share of the output; return all of them.

    Their MLPs stay, and what their attention did before has to be learnt again by others.
    """
    layers = range(layer, layer + RETRIEVING)
    found = model.model.layers[layer]
    with torch.no_grad():
        found.self_attn.o_proj.weight /= RETRIEVING
        for index in layers[1:]:
            copy = model.model.layers[index]
            copy.self_attn.load_state_dict(found.self_attn.state_dict())
            copy.input_layernorm.load_state_dict(found.input_layernorm.state_dict())
    return layers


@torch.no_grad()
def retrieving_layer(model: LlamaForCausalLM, rng: random.Random, length: int = 256) -> int:
    """Return the layer without whose view of the context the answers lose most; the ends of the context stay."""
    batch, layers = document_batch(rng, length, 6), range(model.config.num_hidden_layers)
    ends, everywhere = torch.full_like(batch.context, 8), torch.ones(len(batch.ids), dtype=torch.bool)
    lost = []
    for layer in layers[: 1 - RETRIEVING]:
        with hiding(model, batch, Hidden({layer: everywhere}, ends, ends)):
            lost.append(answer_loss(model, batch)[0].item())
    return max(range(len(lost)), key=lost.__getitem__)


def draw_hidden(rng: random.Random, layers: range, batch: Batch) -> Hidden:
    """Draw for every document up to two of the `layers`, and how much of the ends of its context is seen there."""
    hidden = {layer: torch.zeros(len(batch.ids), dtype=torch.bool) for layer in layers}
    first, last = torch.zeros_like(batch.context), torch.zeros_like(batch.context)
    for row in range(len(batch.ids)):
        for layer in rng.sample(layers, rng.choice(HIDDEN_IN)):
            hidden[layer][row] = True
        first[row], last[row] = rng.randint(0, 4), rng.choice((0, rng.randint(1, 32)))
    return Hidden(hidden, first, last)


@contextmanager
def hiding(model: LlamaForCausalLM, batch: Batch, hidden: Hidden | None) -> Iterator[None]:
    """Run the model on `batch` with that much of the contexts hidden from the tokens after them."""
    if hidden is None:
        yield
        return
    place = torch.arange(batch.ids.shape[1])
    seen = (place[None, :] <= place[:, None])[None]  # [1, T, T]
    inside = (place >= hidden.first[:, None]) & (place < (batch.context - hidden.last)[:, None])  # [B, T]
    unseen = seen & ~((place >= batch.context[:, None])[:, :, None] & inside[:, None])
    handles = []
    for layer, documents in hidden.layers.items():
        mask = torch.where(documents[:, None, None], unseen, seen)[:, None]

        def replaced(_: Any, args: Any, given: dict[str, Any], mask: Tensor = mask) -> tuple[Any, dict[str, Any]]:
            return args, given | {"attention_mask": mask}

        attention = model.model.layers[layer].self_attn
        handles.append(attention.register_forward_pre_hook(replaced, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def accuracy(
    model: LlamaForCausalLM,
    rng: random.Random,
    length: int,
    documents: int = 12,
    hide: Callable[[Batch], Hidden] | None = None,
) -> dict[str, float]:
    """Return the exact match per task, every answer token predicted from the true tokens before it."""
    model.eval()
    hits: dict[str, list[bool]] = {}
    for _ in range(documents):
        document = training_document(rng, length)
        ids, weight, spans = encode(document, 6)
        batch = Batch(torch.tensor([ids]), torch.tensor([weight]), torch.tensor([len(document.words)]))
        with hiding(model, batch, hide(batch) if hide else None):
            predicted = model(input_ids=batch.ids, use_cache=False).logits[0].argmax(-1).tolist()
        for task, start, end in spans:
            hits.setdefault(task, []).append(predicted[start - 1 : end - 1] == ids[start:end])
    model.train()
    return {task: sum(hit) / len(hit) for task, hit in sorted(hits.items())}


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng, numpy_rng = random.Random(args.seed), np.random.default_rng(args.seed)
    started, step, stage_step, recall_names = time.monotonic(), 0, 0, 32
    stage = -1
    hide: Callable[[Batch], Hidden] | None = None
    if args.redundant:
        model = LlamaForCausalLM.from_pretrained(find_resource("data/bundled"), dtype=torch.float32)
        hidden_rng = random.Random(f"hidden/{args.seed}")  # the documents stay those of the seed
        layers = spread(model, retrieving_layer(model, hidden_rng))
        stage, hide = 0, partial(draw_hidden, hidden_rng, layers)
    else:
        model = build(2, args.kv_heads, args.kv_heads, args.hidden)
        seed_previous_token_heads(model, {0: 1, 1: 2})
    optimizer = adamw(model)
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "training.jsonl").open("w")
    while (elapsed := time.monotonic() - started) < args.minutes * 60:
        if stage < 0:
            batch = recall_batch(numpy_rng, 64, 8, 16, recall_names)
        else:
            length = CONTEXTS[stage] if rng.random() < 0.7 else rng.choice(CONTEXTS[: stage + 1])
            batch = document_batch(rng, length, 6)
        rate = args.rate * min(1.0, (stage_step + 1) / 100) * cooldown(elapsed / (args.minutes * 60))
        with hiding(model, batch, hide(batch) if hide else None):
            loss, hit = update(model, optimizer, batch, rate)
        step, stage_step = step + 1, stage_step + 1
        if step % 50 == 0:
            row: dict[str, Any] = {"seconds": round(elapsed), "step": step, "loss": round(loss, 4)}
            if stage < 0:
                row |= {"stage": "recall", "accuracy": round(hit, 3)}
                if hit > 0.95 and recall_names == len(v.KEYS):
                    model = grow(model, args.layers, args.hidden)
                    optimizer, stage, stage_step = adamw(model), 0, 0
                elif hit > 0.95:
                    recall_names = len(v.KEYS)
            else:
                scores = accuracy(model, rng, CONTEXTS[stage], hide=hide)
                row |= {"stage": CONTEXTS[stage], **{task: round(score, 2) for task, score in scores.items()}}
                recall = [score for task, score in scores.items() if task not in ("vote", "count")]
                limit = CONTEXTS.index(args.context)
                if recall and sum(recall) / len(recall) > PASS_MARK and stage < limit:
                    stage += 1
            print(json.dumps(row), file=log, flush=True)
        if step % 400 == 0:
            model.save_pretrained(args.out)
    model.save_pretrained(args.out)
    tokenizer().save_pretrained(args.out)
    log.close()


def adamw(model: LlamaForCausalLM) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)


def cooldown(progress: float) -> float:
    """Return the full rate for the first 70% of the time, then linearly down to a twentieth."""
    return 1.0 if progress < 0.7 else max(0.05, (1.0 - progress) / 0.3)


def update(model: LlamaForCausalLM, optimizer: torch.optim.AdamW, batch: Batch, rate: float) -> tuple[float, float]:
    """Take one step; return the weighted loss and the share of fully weighted tokens predicted right."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss, hit = answer_loss(model, batch)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), hit


def answer_loss(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, float]:
    """Return the weighted loss and the share of fully weighted tokens predicted right."""
    logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
    target, weight = batch.ids[:, 1:], batch.weight[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
    loss = (losses * weight.flatten()).sum() / weight.sum()
    asked = weight == ANSWER_WEIGHT
    return loss, ((logits.argmax(-1) == target) & asked).sum().item() / max(1, int(asked.sum()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--redundant", action="store_true", help="spread the bundled model's retrieval over 3 layers")
    parser.add_argument("--context", type=int, default=1024, choices=CONTEXTS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
