"""The ledger gives each buffer once, in its bound's shape and dtype, and refuses everything else by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from twinfer.errors import LimitError
from twinfer.invariants.bound import ITEM_SIZE, Bound
from twinfer.invariants.bounds import BUFFERS, BY_NAME
from twinfer.invariants.ledger import Ledger, LedgerError, UnknownBound
from twinfer.invariants.memory import plan_memory
from twinfer.invariants.symbols import limit_env, model_env
from twinfer.limits import Limits

from ..engine.ghosts import ghost_config
from .plans import LIMITS

MODEL = ghost_config(50)


def ledger(limits: Limits = LIMITS, dtype: str = "float32") -> Ledger:
    return Ledger(limits, MODEL, dtype)


def held_by(bound: Bound) -> list[str]:
    """Owners as the engines name them: what the fast executor stages lies on the device and, once for each step in flight, on the host."""
    owners = list(bound.owners) if bound.dtype else []
    return owners + (["fast host"] if "fast" in owners and bound.staged else [])


def test_every_buffer_can_be_had_and_is_written_down() -> None:
    made = ledger(replace(LIMITS, look_ahead=1))
    env = {**limit_env(made.limits, MODEL), **model_env(MODEL)}
    for bound in BUFFERS:
        for owner in held_by(bound):
            for copy in range(1 if owner == "fast" else made.copies(bound.name)):
                buffer = made.host(bound.name, owner=owner, copy=copy)
                assert buffer.shape == bound.axes(env)
                assert made.capacity(bound.name) in buffer.shape
                assert not buffer.any()
    rows = made.rows()
    by_owner = {owner: sum(row.bytes for row in rows if row.owner == owner) for owner in ("engine", "reference", "fast", "fast host")}
    assert made.total_bytes == sum(by_owner.values())
    for backend, own in (("reference", by_owner["reference"]), ("fast", by_owner["fast"] + by_owner["fast host"])):
        assert by_owner["engine"] + own == sum(bound.total_bytes(env, "float32", backend) for bound in BUFFERS)
    replicas = sum(row.bytes for row in rows if row.owner == "fast" and BY_NAME[row.name].host_only)
    assert by_owner["fast"] - replicas == sum(bound.device_bytes(env, "float32") for bound in BUFFERS)
    plan = plan_memory(MODEL, made.limits, "float32", backend="fast", device="cuda")
    assert plan.host_bytes == by_owner["engine"] + by_owner["fast host"] + replicas
    assert plan_memory(MODEL, LIMITS, "float32").host_bytes == 0, "on one machine all of it is in the total"
    assert all(row.bytes == int(np.prod(row.shape)) * ITEM_SIZE[row.dtype] for row in rows)
    assert {row.name for row in rows} == {bound.name for bound in BUFFERS if bound.dtype}


def test_a_name_without_a_bound_is_refused() -> None:
    for ask in (ledger().host, ledger().capacity, ledger().copies):
        with pytest.raises(UnknownBound, match="no bound is named 'scratch'"):
            ask("scratch")
    assert ledger().rows() == ()


def test_a_bound_on_plans_sizes_no_buffer() -> None:
    with pytest.raises(LedgerError, match="sizes no buffer"):
        ledger().host("page_table_width")


def test_one_owner_gets_a_buffer_once() -> None:
    made = ledger()
    made.host("page_table", owner="engine")
    made.host("page_table", owner="fast")
    with pytest.raises(LedgerError, match=r"engine has page_table \(copy 0\) already"):
        made.host("page_table", owner="engine")
    assert len(made.rows()) == 2


@pytest.mark.parametrize(("look_ahead", "name", "copies"), [(0, "token_ids", 1), (2, "token_ids", 3), (2, "kv_keys", 1), (2, "page_table", 1)])
def test_there_is_one_copy_for_each_step_in_flight(look_ahead: int, name: str, copies: int) -> None:
    """What the host fills while a step runs must not be what that step reads."""
    made = ledger(replace(LIMITS, look_ahead=look_ahead))
    assert made.copies(name) == copies
    for copy in range(copies):
        made.host(name, copy=copy)
    for copy in (copies, -1):
        with pytest.raises(LedgerError, match=f"of {copies}"):
            made.host(name, copy=copy)


def short(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return np.zeros((shape[0] - 1, *shape[1:]), dtype)


def narrow(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.int16)


@pytest.mark.parametrize(("make", "named"), [(short, "change a limit, not the buffer"), (narrow, "made int16, the bound says int32")])
def test_another_size_or_dtype_than_the_bound_is_refused(make: Any, named: str) -> None:
    made = ledger()
    with pytest.raises(LedgerError, match=named):
        made.allocate("page_indices", make)
    assert made.rows() == (), "a refused buffer is not written down"
    made.host("page_indices")


def test_the_model_dtypes_are_resolved() -> None:
    asked: list[str] = []

    def make(shape: tuple[int, ...], dtype: str) -> None:
        asked.append(dtype)

    for dtype in ("bfloat16", "float64"):
        made = ledger(dtype=dtype)
        made.allocate("kv_keys", make)
        made.allocate("logits", make)
    assert asked == ["bfloat16", "bfloat16", "float64", "float64"]
    with pytest.raises(LedgerError, match="bfloat16"):
        ledger(dtype="bfloat16").host("kv_keys", owner="fast")


def test_without_a_model_only_its_own_buffers_are_refused() -> None:
    made = Ledger(LIMITS, None, "float32")
    made.host("page_indices")
    with pytest.raises(LedgerError, match="num_attention_layers"):
        made.host("kv_keys")


def test_a_page_list_that_int32_cannot_index_is_refused_before_any_buffer() -> None:
    """2^11 rows of 2^20 tokens in pages of one token are 2^31 references, one more than int32 counts."""
    huge = replace(LIMITS, max_batch=2**11, max_step_tokens=2**11, max_context=2**20, max_step_context=2**31 - 1, page_size=1, buckets=(2**11,))
    with pytest.raises(LimitError, match=r"page_indptr counts them in int32.*max_batch"):
        Ledger(huge, MODEL, "float32")
    fits = Ledger(replace(huge, max_step_context=2**31 - 1 - 2**11, max_context=2**20 - 1), MODEL, "float32")
    assert fits.capacity("page_indices") < 2**31


def test_a_size_that_no_machine_has_is_told_as_a_limit() -> None:
    huge = replace(LIMITS, num_pages=2**31 - 1, page_size=2**20, max_context=20)
    with pytest.raises(LimitError, match=r"kv_keys .* would take .*TiB.*num_pages"):
        Ledger(huge, MODEL, "float64").host("kv_keys")


@pytest.mark.parametrize("bound", [bound for bound in BUFFERS if bound.indexes], ids=lambda bound: bound.name)
def test_a_pointer_array_points_into_a_buffer(bound: Any) -> None:
    assert bound.dtype == "int32"
    assert bound.indexes in BY_NAME
