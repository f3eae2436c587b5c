"""Every error that twinfer raises on purpose, with its numbers as fields; not a place for control flow.

Errors of input are `ValueError`s too, so that a caller who knows nothing of twinfer catches them the usual way.
"""


class TwinferError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(TwinferError, ValueError):
    """A model's config.json says something that twinfer can't run: names the file, the field and the value."""


class UnsupportedModel(ConfigError):
    """The model type is not one that twinfer has an executor for."""

    def __init__(self, source: str, model_type: object, supported: tuple[str, ...]) -> None:
        self.source, self.model_type, self.supported = source, model_type, supported
        what = "model_type is missing" if model_type is None else f"model_type {model_type!r} is not supported"
        super().__init__(f"{source}: {what}; supported: {', '.join(supported)}")


class CheckpointError(TwinferError, ValueError):
    """A checkpoint directory is not what its config.json says: names the file and the tensor."""


class LimitError(TwinferError, ValueError):
    """A value of `Limits` is impossible, or two sources disagree: names the field, the value and the limit."""


class RequestRefused(TwinferError, ValueError):
    """A request that can't be served, refused before anything is allocated.

    `field` is the request's or sampling parameter's field, `value` what it held, `limit` what is allowed (in words or a number), `remedy` what to do
    where that does not go without saying.
    """

    def __init__(self, field: str, value: object, limit: object, remedy: str = "") -> None:
        self.field, self.value, self.limit, self.remedy = field, value, limit, remedy
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(f"{field} = {shown}: must be {limit}{'; ' * bool(remedy)}{remedy}")


class BoundViolation(TwinferError):
    """A plan asks more of a buffer than its bound grants. `rows` are the plan's rows that cause it (empty: the whole step)."""

    def __init__(self, bound: str, unit: str, demand: int, capacity: int, remedy: str, rows: tuple[int, ...] = ()) -> None:
        self.bound, self.unit, self.demand, self.capacity, self.remedy, self.rows = bound, unit, demand, capacity, remedy, rows
        where = f" (rows {list(rows)})" if rows else ""
        super().__init__(f"bound {bound!r}: the step needs {demand} {unit}, the limit is {capacity}{where}; {remedy}")


class LawViolation(TwinferError):
    """A plan or the engine's state breaks a law. `rows` are the plan's rows that break it (empty: not a row's fault)."""

    def __init__(self, law: str, detail: str, rows: tuple[int, ...] = ()) -> None:
        self.law, self.detail, self.rows = law, detail, rows
        where = f" (rows {list(rows)})" if rows else ""
        super().__init__(f"law {law!r} is broken: {detail}{where}")


class StepFailed(TwinferError):
    """An executor failed after launch while its device lives: the rows of this step end with an error, nobody else."""


class ExecutorLost(TwinferError):
    """The device or the worker is gone: every request ends with an error and health is false from that moment."""


class AllocationError(TwinferError):
    """Memory was taken on the device inside a forward, where every byte should lie in a buffer with a bound."""

    def __init__(self, what: str, num_blocks: int, num_bytes: int) -> None:
        self.what, self.num_blocks, self.num_bytes = what, num_blocks, num_bytes
        super().__init__(f"{what} took {num_bytes} bytes in {num_blocks} blocks that no bound counts")


class TableVersionError(TwinferError):
    """A plan's page-table delta does not start at the version that the table has: a plan was lost or run twice."""

    def __init__(self, have: int, want: int) -> None:
        self.have, self.want = have, want
        super().__init__(f"page table is at version {have}, the plan's delta starts at version {want}")
