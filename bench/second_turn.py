"""Time to the first token of a second turn: a long prompt is answered, then prompt, answer and new tokens are sent. It measures the fast engine alone.

python -m twinfer.bench.second_turn --model qwen3.6-35b-a3b    on a GPU, with random weights
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from twinfer.bench.models import Model, fast_engine, load_model
from twinfer.bench.record import RECORDS, Record, append, current_commit, device_slug, package_versions, today
from twinfer.engine.engine import Engine
from twinfer.limits import Limits, ceil_div
from twinfer.sampling import SamplingParams

PAGE = 64


def limits_of(model: Model, prompt: int, answer: int, new: int, turns: int) -> Limits:
    """Room for every turn's own pages at once, and for two snapshots of each, so that nothing is evicted."""
    context = prompt + answer + new + 2
    return Limits(
        max_batch=1, max_step_tokens=8192, max_chunk_tokens=8192, warmup_tokens=512, max_context=context, max_step_context=context, max_logit_tokens=16,
        page_size=PAGE, num_pages=(1 + turns) * ceil_div(context + 1, PAGE), look_ahead=1, buckets=(1,),
        num_snapshots=16 if model.config.num_gdn_layers else 0,
    )  # fmt: skip


def first_token(engine: Engine, prompt: Sequence[int], most: int) -> tuple[float, list[int], int]:
    """Seconds until the first token, all tokens, and how many of the prompt's were found in the cache."""
    began = time.perf_counter()
    first, tokens = 0.0, list[int]()
    engine.add(list(prompt), SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise RuntimeError(event.error)
            if event.tokens and not tokens:
                first = time.perf_counter() - began
            tokens += event.tokens
    return first, tokens, engine.scheduler.num_prefix_hits


def measure(model: Model, prompt: int, answer: int, new: int, turns: int) -> tuple[float, list[float], list[int]]:
    """Seconds to the first token of the cold prompt, of each second turn, and the tokens that each found in the cache."""
    engine = fast_engine(model, limits_of(model, prompt, answer, new, turns))
    vocabulary = model.config.vocab_size
    ids = [(7919 * i + 13) % vocabulary for i in range(prompt)]
    cold, answered, before = first_token(engine, ids, answer)
    history, times, found = [*ids, *answered], [], []
    for turn in range(turns):
        again, _, cached = first_token(engine, [*history, *((104729 * (turn + 1) + i) % vocabulary for i in range(new))], 1)
        times.append(again)
        found.append(cached - before)
        before = cached
    engine.close()
    return cold, times, found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m twinfer.bench.second_turn", description="Time to the first token of a second turn, on the fast engine.")
    parser.add_argument("--model", default="qwen3.6-35b-a3b", help="a shape with random weights, or a checkpoint directory")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the first turn")
    parser.add_argument("--answer", type=int, default=256, help="tokens that it is answered with")
    parser.add_argument("--new", type=int, default=64, help="tokens that the second turn adds")
    parser.add_argument("--turns", type=int, default=5, help="second turns, each with other new tokens; the median counts")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--record", action="store_true", help="add the figures to the records")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the records to add to")
    parser.add_argument("--commit", help="hash to record, where the code runs outside of its repository")
    options = parser.parse_args(arguments)
    model = load_model(options.model, None, options.device)
    cold, times, found = measure(model, options.prompt, options.answer, options.new, options.turns)
    median = statistics.median(times)
    print(f"{model.name}: cold {cold * 1e3:.1f} ms; second turn {median * 1e3:.1f} ms (of {[round(t * 1e3, 1) for t in times]}), found {found} tokens")
    if options.record:
        notes = f"prompt of {options.prompt} tokens, {options.answer} answered, {options.new} new; found {found}; cold {cold * 1e3:.1f} ms"
        record = Record(
            model=model.name, workload="second_turn", engine="fast", metric="ttft_ms", value=median * 1e3, unit="ms", law2=None,
            commit=options.commit or current_commit(), date=today(), device=device_slug(options.device),
            versions=package_versions("twinfer", "torch", "triton"), notes=notes, seed=model.random_seed,
        )  # fmt: skip
        append([record], options.records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
