"""Adapters for the engines at hand: both of ours and transformers. Factories for --twinfer-engine; no gate looks at which one it has."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from twinfer.errors import RequestRefused
from twinfer.invariants.gates.adapter import Answer, Ask, Event, Pages, Refused, Setup
from twinfer.request import GenerateResult, Request, TokenLogprob
from twinfer.sampling import SamplingParams

PAGE_SIZE = 16  # tokens; small, so that short prompts fill several
PAGES_WITHOUT_SETTING = 1024  # 16384 tokens: 50 MB of keys and values for the bundled model in float32


def reference(setup: Setup) -> EngineAdapter:
    """twinfer.reference, in float32 unless the setup says otherwise."""
    import twinfer.reference

    return EngineAdapter(twinfer.reference.Engine, setup, one_arithmetic=False)  # a CPU's BLAS gives bits by the number of rows


def fast(setup: Setup) -> EngineAdapter:
    """twinfer.fast, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1), in float32 unless the setup says otherwise."""
    import twinfer.fast

    return EngineAdapter(twinfer.fast.Engine, setup, one_arithmetic=True)


def transformers(setup: Setup) -> TransformersAdapter:
    """Hugging Face transformers' `generate`, in float32 unless the setup says otherwise."""
    return TransformersAdapter(setup)


class EngineAdapter:
    """A `twinfer.engine.Engine`. It has every capability, but one_arithmetic only where the executor does."""

    def __init__(self, engine_class: Any, setup: Setup, *, one_arithmetic: bool) -> None:
        from twinfer.invariants.gates.adapter import CAPABILITIES

        self.dtype = setup.dtype or "float32"
        self.page_size = PAGE_SIZE
        self.capabilities = frozenset(CAPABILITIES) - (frozenset() if one_arithmetic else {"one_arithmetic"})
        limits = {
            "max_batch": setup.max_batch,
            "max_context": setup.max_context,
            "page_size": PAGE_SIZE,
            "num_pages": setup.num_pages or PAGES_WITHOUT_SETTING,
            "max_chunk_tokens": setup.max_chunk_tokens,
            "max_step_tokens": setup.max_step_tokens,
        }
        self.engine = engine_class.from_pretrained(
            setup.model, dtype=self.dtype, limits=limits, tokenizer=False, prefix_cache=setup.prefix_cache
        )
        self.hit_grid = self.engine.scheduler.hit_grid

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        try:
            return [_answer(result) for result in self.engine.generate([_request(ask) for ask in asks])]
        except RequestRefused as error:
            raise Refused(str(error)) from error

    def add(self, ask: Ask) -> Hashable:
        try:
            return int(self.engine.add(_request(ask)))
        except RequestRefused as error:
            raise Refused(str(error)) from error

    def step(self) -> list[Event]:
        return [
            Event(
                event.request_id,
                event.tokens,
                _numbers(event.logprobs) if event.tokens else None,
                event.num_cached_tokens,
                event.terminal,
                event.error,
            )
            for event in self.engine.step()
        ]

    def abort(self, request: Hashable) -> None:
        self.engine.abort(request)

    def pages(self) -> Pages:
        pool = self.engine.scheduler.pool
        return Pages(pool.num_pages, pool.num_free, pool.num_held, pool.num_cached)

    def close(self) -> None:
        self.engine.close()


def _request(ask: Ask) -> Request:
    params = SamplingParams(
        max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0 if ask.prompt_logprobs else None
    )
    return Request(tuple(ask.prompt), params, ask.cache_salt)


def _numbers(entries: Sequence[TokenLogprob] | None) -> list[float] | None:
    return None if entries is None else [entry.logprob for entry in entries]


def _answer(result: GenerateResult) -> Answer:
    (only,) = result.completions
    if only.error is not None:
        return Answer(error=only.error)
    return Answer(only.tokens, _numbers(only.logprobs), _numbers(result.prompt_logprobs), result.num_cached_tokens)


class TransformersAdapter:
    """`generate` of transformers: requests of one call in one batch, padded on the left. No pages, no steps."""

    capabilities = frozenset({"logprobs", "prompt_logprobs", "batch", "same_bits"})

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.dtype = setup.dtype or "float32"
        # Fused attention gives rows that are all padding other numbers than zero in some versions; eager is the form that the goldens were made with.
        model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=getattr(torch, self.dtype), attn_implementation="eager")
        self.model: Any = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        import torch

        width = max(len(ask.prompt) for ask in asks)
        ids = torch.zeros(len(asks), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(asks):
            ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids.to(self.model.device),
                attention_mask=mask.to(self.model.device),
                max_new_tokens=max(ask.max_tokens for ask in asks),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                temperature=None,
                top_k=None,
                top_p=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = out.sequences[:, width:].cpu()
        logprobs = torch.stack(out.logits, 1).double().log_softmax(-1).cpu().gather(2, tokens[..., None])[..., 0]
        return [
            Answer(tokens[row, : ask.max_tokens].tolist(), logprobs[row, : ask.max_tokens].tolist(), self._scores(ask) if ask.prompt_logprobs else None)
            for row, ask in enumerate(asks)
        ]

    def _scores(self, ask: Ask) -> list[float]:
        """Log probabilities of the prompt's tokens from the second on."""
        import torch

        ids = torch.tensor([ask.prompt], device=self.model.device)
        with torch.inference_mode():
            scores = self.model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
        found: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
        return found
