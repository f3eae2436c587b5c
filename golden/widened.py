"""HF transformers' Qwen3 types in float64, their internal float32 casts widened, and their stock forms. The arithmetic is HF's; none of it is ours.

`model.double()` is not enough: HF casts to float32 inside RMSNorm, rotary embedding and softmax whatever the weights are. Here the source
of the modelling module is read, those casts are rewritten, and the result is executed as a module of its own. `forward` then watches
every operation and refuses one that yields a narrower float, so that a cast which a later transformers adds cannot slip through.
"""

import functools
import importlib.util
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# What the fp32 casts look like in HF's source: the dtype by name, its alias, the method.
REWRITES = ((r"torch\.float32\b", "torch.float64"), (r"torch\.float\b", "torch.float64"), (r"\.float\(\)", ".double()"))


# transformers' class of the text model of each type.
CLASSES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}
# One expert after the other, as a plain loop: the other implementations sum in another order.
_EXPERTS = {name: {"experts_implementation": "eager"} for name in ("qwen3_moe", "qwen3_next", "qwen3_5_moe")}


def stock_class(model_type: str) -> Any:
    """transformers' class of the text model of a type."""
    return getattr(importlib.import_module("transformers"), CLASSES[model_type])


class NarrowTensor(TypeError):
    """An operation of the widened model gave a float narrower than float64."""


class SourceMoved(RuntimeError):
    """transformers' source no longer has the casts that are to be widened."""


@functools.cache
def widened_module(model_type: str = "qwen3") -> ModuleType:
    """transformers' modelling module of a type, for instance "qwen3_next", with every float32 cast widened to float64.

    Raises `SourceMoved` if one of REWRITES is not found: then the source changed and has to be read again.
    """
    name = f"transformers.models.{model_type}.modeling_{model_type}"
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SourceMoved(f"{name}: not found")
    source = Path(spec.origin).read_text()
    for narrow, wide in REWRITES:
        source, count = re.subn(narrow, wide, source)
        if not count:
            raise SourceMoved(f"{spec.origin}: no '{narrow}' to widen")
    module = ModuleType(name + "_float64")
    module.__package__ = name.rpartition(".")[0]  # its relative imports
    module.__file__ = spec.origin  # transformers' docstring decorators look at the path
    sys.modules[module.__name__] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


def load_widened(directory: Path, model_type: str = "qwen3") -> Any:
    """The checkpoint of a type in `directory` as a float64 model on the CPU, eager attention.

    Raises `NarrowTensor` if a parameter or buffer is not float64; `ValueError` for a rope type whose frequencies come from another module.
    """
    import torch

    found = getattr(widened_module(model_type), CLASSES[model_type])
    model = found.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager", **_EXPERTS.get(model_type, {})).eval()
    if model.model.rotary_emb.rope_type != "default":
        raise ValueError(f"rope type '{model.model.rotary_emb.rope_type}': only 'default' is computed inside the widened module")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            raise NarrowTensor(f"{name} is {tensor.dtype}")
    return model


def load_stock(directory: Path, dtype: str, model_type: str = "qwen3") -> Any:
    """The checkpoint of a type in `directory` as HF loads it, on the CPU, eager attention; `dtype` is 'float32' or 'bfloat16'.

    Loaded with `from_pretrained(dtype=...)`: `model.to(bfloat16)` would round the rotary frequencies too.
    """
    import torch

    return stock_class(model_type).from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="eager", **_EXPERTS.get(model_type, {})).eval()


def forward(model: Any, token_ids: "Sequence[int] | np.ndarray") -> "tuple[np.ndarray, np.ndarray]":
    """One teacher-forced pass of a single prompt [T].

    Returns (logits [T, V], boundaries [T, L + 2, h]), both float64; boundaries: the outputs of embedding, each layer and final norm.
    A float64 model is watched: an operation that yields a narrower float raises `NarrowTensor`.
    """
    import numpy as np
    import torch

    kept: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output)[0].double())

    trunk = model.model
    hooks = [module.register_forward_hook(keep) for module in (trunk.embed_tokens, *trunk.layers, trunk.norm)]
    try:
        with torch.no_grad(), _only_float64() if model.dtype == torch.float64 else nullcontext():
            ids = torch.as_tensor(np.asarray(token_ids, dtype=np.int64))[None]
            logits = model(input_ids=ids, use_cache=False).logits[0].double()
    finally:
        for hook in hooks:
            hook.remove()
    return logits.numpy(), torch.stack(kept, dim=1).numpy()


def _only_float64() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class OnlyFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                    raise NarrowTensor(f"{func} gave {leaf.dtype} of shape {tuple(leaf.shape)}")
            return output

    return OnlyFloat64()  # type: ignore[no-untyped-call]
