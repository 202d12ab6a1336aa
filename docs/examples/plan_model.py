"""Plan a model: measure it, write a plan, compare the plan with even budgets at the same size.

The bundled model takes seconds. For a model of yours: its hub id or directory as MODEL, `jsonl:FILE` with your
questions as TASKS, and leave out `questions` and `samples`, which make everything small here.
"""

import kvsearch

MODEL = "bundled"
TASKS = "synthetic:multikey"

kvsearch.calibrate(MODEL, output="runs/lukv", method="lukv", policy="snapkv", questions=2)
plan = kvsearch.export("runs/lukv", ratio=0.8, output="plan.json", force=True)  # evict 80% of any prompt
print("entries by layer:", [sum(layer) for layer in plan.budgets("prefill") if layer])

result = kvsearch.evaluate(MODEL, plan="plan.json", tasks=TASKS, samples=5)
[size] = result.as_json()["blocks"]
for method in size["methods"]:
    score = method["scores"]["averages"]["macro"]
    print(f"{method['name']:<10} {method['held']['entries']:6.0f} entries, score {100 * score['mean']:.1f}")
