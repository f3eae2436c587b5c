"""Makes golden logits from HF transformers on the CPU: the only writer of goldens. Never run on the output of an engine of ours.

    python -m twinfer.golden.make --model golden/qwen3 --reason "why the stored numbers have to change"

Needs neither a GPU nor the training text. The files are reproducible to the byte on one processor type with one set of versions; float64 values agree
between machines to about 1e-12.
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinfer.golden.compare import Comparison, MismatchedLogits, NothingCompared, compare_all, pool
from twinfer.golden.documents import Document, cases, layout, spread, token_ids
from twinfer.golden.family import model_type_of
from twinfer.golden.manifest import FOLDER, PRECISIONS, SCHEMA, GoldenMissing, Goldens, GoldenTampered, load_goldens, sha256
from twinfer.golden.widened import forward, load_stock, load_widened

if TYPE_CHECKING:
    import numpy as np

TOP_K = 64
CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
)
PROMPT_RECIPE = (
    "comedy, tragedy: head of prompts/<name>.txt, from plays held out of training; repeated: tragedy's first 16 tokens over and over; "
    "chat: system prompt, one exchange, a second question in the chat template. A case is a prefix of a document."
)


def record(document: Document, ids: list[int], models: dict[str, Any]) -> "tuple[dict[str, np.ndarray], np.ndarray]":
    """Run every model of `models` (by precision) over `ids`; returns the tensors to store and the float64 logits [T, V]."""
    import numpy as np

    fine, coarse, full = np.asarray(spread(document.fine)), np.asarray(spread(document.coarse)), np.asarray(document.full)
    assert set(coarse) <= set(fine), f"document '{document.name}': coarse positions outside the fine ones"
    logits, boundaries = forward(models["fp64"], ids)
    assert np.isfinite(logits).all(), f"document '{document.name}': HF's float64 logits are not finite"
    top_ids = np.argsort(-logits[fine], axis=1, kind="stable")[:, :TOP_K]  # stable: the lowest id wins a tie
    tensors = {
        "token_ids": np.asarray(ids, dtype=np.int32),
        "fine_positions": fine.astype(np.int32),
        "coarse_positions": coarse.astype(np.int32),
        "top_ids": top_ids.astype(np.uint16 if logits.shape[1] <= 1 << 16 else np.int32),
        "full_positions": full.astype(np.int32),
        "full_logits": logits[full],
        "full_hidden": boundaries[full],
    }
    for precision in PRECISIONS:
        values = logits if precision == "fp64" else forward(models[precision], ids)[0]
        positions, dtype = (fine, np.float64) if precision == "fp64" else (coarse, np.float32)
        values = values[positions]
        peak = values.max(axis=1)
        logsumexp = peak + np.log(np.exp(values - peak[:, None]).sum(axis=1))
        listed = np.take_along_axis(values, top_ids[np.searchsorted(fine, positions)], axis=1) - logsumexp[:, None]
        tensors[f"{precision}.logprobs"] = listed.astype(dtype)
        tensors[f"{precision}.logsumexp"] = logsumexp.astype(dtype)
        tensors[f"{precision}.top1_ids"] = values.argmax(axis=1).astype(np.int32)
    return {f"{document.name}.{key}": value for key, value in tensors.items()}, logits


def write_tensors(tensors: "dict[str, np.ndarray]", path: Path) -> None:
    """Write `tensors`, by name, with the metadata in one sorted-JSON key: several keys would come out in another order on every run."""
    import numpy as np
    from safetensors.numpy import save_file

    metadata = {"twinfer": json.dumps({"schema": SCHEMA, "top_k": TOP_K}, sort_keys=True)}
    save_file({name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}, path, metadata=metadata)
    path.chmod(0o644)


def floor(goldens: Goldens, golden: str, other: str) -> dict[str, Any]:
    """Metrics of HF's precision `other` against its precision `golden` on the stored positions, nat."""
    return figures(pool(f"{other} against {golden}", goldens.documents.values(), golden, other))


def figures(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a comparison, rounded to four digits, for the manifest."""
    metrics = {name: float(f"{getattr(comparison, name):.4g}") for name in ("max", "mean", "p99", "logsumexp", "regret")}
    return {"num_positions": comparison.num_positions} | metrics


def difference(old: Goldens | None, logits: "dict[str, np.ndarray]") -> str:
    """One line: how far the new float64 logits [T, V], by document, are from the old goldens."""
    if old is None:
        return "no goldens before these"
    same = [document for name, document in old.documents.items() if name in logits and len(document.token_ids) == len(logits[name])]
    answers = iter([logits[document.name] for document in same])
    try:
        result = compare_all(same, lambda _: next(answers))
    except (MismatchedLogits, NothingCompared) as error:
        return f"old and new cannot be compared: {error}"
    return f"new against old: {result}"


def make(model_dir: Path, prompts: Path, reason: str) -> str:
    """Write `model_dir`/goldens; returns the line that compares them with the goldens that were there."""
    import numpy as np
    import safetensors
    import tokenizers
    import torch
    import transformers

    try:
        old: Goldens | None = load_goldens(model_dir, checkpoint=False)
    except (GoldenMissing, GoldenTampered) as error:
        print(f"note: {error}", file=sys.stderr)
        old = None
    torch.set_num_threads(1)  # sums are split by the number of threads
    kind = model_type_of(model_dir)
    models = {"fp64": load_widened(model_dir, kind), "fp32": load_stock(model_dir, "float32", kind), "bf16": load_stock(model_dir, "bfloat16", kind)}
    config, documents = models["fp64"].config, layout(model_dir.name)
    tensors: dict[str, np.ndarray] = {}
    logits: dict[str, np.ndarray] = {}
    for document in documents:
        ids = token_ids(document, model_dir / "tokenizer.json", prompts)
        stored, logits[document.name] = record(document, ids, models)
        tensors |= stored
    folder = model_dir / FOLDER
    folder.mkdir(exist_ok=True)
    write_tensors(tensors, folder / "logits.safetensors")
    probabilities = [np.exp(tensors[f"{document.name}.fp64.logprobs"][:, 0]) for document in documents]
    training = json.loads((model_dir / "training.json").read_text())
    manifest: dict[str, Any] = {
        "schema": SCHEMA,
        "model": {"name": model_dir.name, "type": kind, "vocab_size": config.vocab_size, "layers": config.num_hidden_layers},
        "reason": reason,
        "command": f"python -m twinfer.golden.make --model golden/{model_dir.name} --reason {json.dumps(reason)}",
        "attention": "eager",
        **({} if kind == "qwen3" else {"experts": "eager", "gated_delta_net": "HF's plain PyTorch form, by chunks of 64 tokens"}),
        "forward": "teacher-forced, one prompt at a time, prefilled whole, no cache, CPU, one thread",
        "fp64": "HF's modelling source with its float32 casts widened to float64, inv_freq included",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "safetensors": safetensors.__version__,
            "numpy": np.__version__,
        },
        "cpu": {"machine": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()},
        "seeds": {"training": training["recipe"]["seed"], "making": "none: nothing is drawn"},
        "prompt_recipe": PROMPT_RECIPE,
        "prompts": {file.name: sha256(file) for file in sorted(prompts.glob("*.txt"))},
        "top_k": TOP_K,
        "documents": {
            document.name: {
                "length": document.length,
                "fp64_positions": len(spread(document.fine)),
                "fp32_and_bf16_positions": len(spread(document.coarse)),
                "full_positions": list(document.full),
            }
            for document in documents
        },
        "cases": {name: {"document": document, "length": length} for name, (document, length) in cases(documents).items()},
        "mean_top1_probability": round(float(np.concatenate(probabilities).mean()), 4),
        "checkpoint": {name: sha256(model_dir / name) for name in CHECKPOINT_FILES},
        "data": {f"{FOLDER}/logits.safetensors": sha256(folder / "logits.safetensors")},
        "training": training,
    }
    write_manifest(manifest, folder)
    new = load_goldens(model_dir)
    manifest["noise_floor"] = {"fp32_against_fp64": floor(new, "fp64", "fp32"), "bf16_against_fp32": floor(new, "fp32", "bf16")}
    write_manifest(manifest, folder)
    return difference(old, logits)


def write_manifest(manifest: dict[str, Any], folder: Path) -> None:
    """Write manifest.json, keys in the order given."""
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m twinfer.golden.make", description="Record HF's logits as goldens of a checkpoint.")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory; goldens/ inside it is overwritten")
    parser.add_argument("--reason", required=True, help="why the goldens have to change; kept in the manifest")
    parser.add_argument("--prompts", type=Path, help="directory of prompt texts (default: prompts/ beside the checkpoint)")
    options = parser.parse_args(arguments)
    if not options.reason.strip():
        parser.error("--reason must not be empty")
    model_dir = options.model.resolve()
    line = make(model_dir, options.prompts or model_dir.parent / "prompts", options.reason.strip())
    size = sum(file.stat().st_size for file in (model_dir / FOLDER).iterdir())
    print(f"{model_dir.name}: {size} bytes of goldens; {line}")
    print(json.dumps(json.loads((model_dir / FOLDER / "manifest.json").read_text())["noise_floor"], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
