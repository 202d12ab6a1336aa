"""What OpenVINO GenAI makes of our sizes. Run by the Python of `.venv-openvino`, where kvsearch is not installed.

Arguments: a model directory, the exported file, the number of prompt tokens, and a folder for the converted model.
Prints the tokens that the cache held at most and at the end, as JSON.
"""

import json
import sys
from pathlib import Path

import numpy as np
import openvino
from openvino_genai import (
    AggregationMode,
    CacheEvictionConfig,
    ContinuousBatchingPipeline,
    GenerationConfig,
    SchedulerConfig,
)
from optimum.intel import OVModelForCausalLM

BLOCK, BLOCKS = 32, 200

directory, path, count, converted = sys.argv[1:]
OVModelForCausalLM.from_pretrained(directory, export=True, stateful=True, compile=False).save_pretrained(converted)
sizes = json.loads(Path(path).read_text())
mode = getattr(AggregationMode, sizes.pop("aggregation_mode"))
scheduler = SchedulerConfig()
scheduler.use_cache_eviction = True
scheduler.cache_eviction_config = CacheEvictionConfig(**sizes, aggregation_mode=mode)
scheduler.enable_prefix_caching = False
scheduler.num_kv_blocks = BLOCKS
settings = GenerationConfig()
settings.max_new_tokens, settings.ignore_eos = 8, True
tokens = np.random.default_rng(0).integers(3, 100, (1, int(count)))
pipeline = ContinuousBatchingPipeline(converted, scheduler, "CPU")
pipeline.generate([openvino.Tensor(tokens)], [settings])
found = pipeline.get_metrics()
held = [round(share / 100 * BLOCKS) * BLOCK for share in (found.max_cache_usage, found.cache_usage)]
sys.stdout.write(json.dumps(held) + "\n")
