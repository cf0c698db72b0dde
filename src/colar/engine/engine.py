"""The latent engine: continuous batching for models that feed embeddings back.

Requests join and leave at any step. All running rows, thinking or answering, share one forward of one position each:
what a row feeds (a latent, a token of a chain, the separator that ends its thinking, a token of the answer) is an
embedding like any other, and goes into the row's own next column of the cache (`cache.py`).

    step       1    2    3    4    5    6
    row 0      l1   l2   ###  a    EOS           thinks twice, then answers
    row 1      l1   ###  a    EOS                thinks once
    row 2                          l1   l2 ...   waited for a slot (`scheduler.py`)

Questions are read apart from that, several at once, right-padded, long ones in chunks between steps; one that is
running or has just been read is not read again for its other samples. `step` does one round and returns its events;
`stream` yields events until nothing is left, `generate` folds over it, `async_engine.py` serves. `core.py` has what a
step does, and how a request that fails fails alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from colar import checks
from colar.engine.cache import SlotCache
from colar.engine.core import EngineCore, evaluating
from colar.engine.request import Completion, Event, Request, check, fold, prompt_ids
from colar.engine.runner import Runner
from colar.engine.running import Running
from colar.engine.scheduler import Queued, QueueFull, Scheduler
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM

__all__ = ["Engine", "QueueFull", "evaluating"]

PREFILL_CHUNK = 2048
"""Positions of questions that are read between two steps, padding included."""


class Engine:
    """Answers requests with one model and its method.

    `max_batch` rows run at a time, in at most `token_budget` positions of the cache (None: as many as they need);
    `max_waiting` bounds the queue (None: no bound). Rows that run wait for at most `prefill_chunk` positions of
    questions before their next step. With `compile` forwards are compiled when they are first taken, which lasts a
    minute or two (less when it was done before), and bfloat16 weights on a CPU are kept twice, the second time as
    its matrix units read them; it pays from some thousand steps on, results/speed/generate has figures. With
    `cuda_graphs` steps are recorded as CUDA graphs (`graphs.py`): no GPU has run that, and a CPU gains nothing by it.
    Weights may be trained in place between two calls, not while requests run. ValueError for a backbone whose
    attention the engine does not know.
    """

    def __init__(
        self,
        lm: LatentLM,
        method: Method,
        max_batch: int = 32,
        token_budget: int | None = None,
        max_waiting: int | None = None,
        compile: bool = False,
        prefill_chunk: int = PREFILL_CHUNK,
        cuda_graphs: bool = False,
    ) -> None:
        if compile and cuda_graphs:
            raise ValueError("an engine has compile or cuda_graphs, not both")
        checks.check_number("prefill_chunk", prefill_chunk, 1, whole=True)
        self.scheduler = Scheduler(max_batch, token_budget, max_waiting, spare=compile, filled=cuda_graphs)
        runner = Runner(lm, compile, max_batch, cuda_graphs)
        self.lm = runner.lm
        self.method = method
        self.core = EngineCore(runner, method, self.scheduler, prefill_chunk)
        self._n_requests = 0

    @property
    def running(self) -> Running | None:
        """The running rows."""
        return self.core.batch.running

    @property
    def cache(self) -> SlotCache:
        """Keys and values of the running rows."""
        return self.core.batch.cache

    # The queue

    @property
    def busy(self) -> bool:
        """Whether anything runs or waits, or was not said yet."""
        return self.core.busy

    def submit(self, request: Request) -> int:
        """Put a request into the queue. Returns its number, which its events have too.

        ValueError where it cannot be run, QueueFull where `max_waiting` others wait.
        """
        entry = self._enter(request)
        self.scheduler.add(entry)
        return entry.number

    def _enter(self, request: Request) -> Queued:
        """Check, tokenise and number a request."""
        check(self.method, request)
        ids = prompt_ids(self.lm, self.method, request)
        entry = Queued(self._n_requests, request, tuple(ids))
        self.scheduler.check(entry)
        self._n_requests += 1
        return entry

    def cancel(self, request: Request) -> bool:
        """Forget a request, this very object, waiting or running. No event follows. False where it is not here."""
        return self.core.cancel(request)

    def clear(self) -> None:
        """Forget all requests, waiting or running."""
        self.core.clear()

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests. Raises as `stream` does."""
        completions = fold(self.lm, self.stream(requests))
        return sorted(completions, key=lambda completion: completion.number)

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Events of all requests as they happen. All are checked before the first forward.

        They wait outside the queue, whatever its bound. Closing the stream cancels what is left of them. A request
        whose step raised does not finish; when all others have, its error is raised (the first, where there are
        several). RuntimeError where other requests run or wait: their events would come out here.
        """
        if self.busy:
            raise RuntimeError("the engine is busy with other requests: use step, or an AsyncEngine")
        outside = deque([self._enter(request) for request in requests])
        unfinished = {entry.number: entry.request for entry in outside}
        failed: Exception | None = None
        try:
            while outside or self.busy:
                while outside and len(self.scheduler) < self.scheduler.room:
                    self.scheduler.add(outside.popleft())
                for event in self.step():
                    if event.kind == "finished":
                        unfinished.pop(event.number, None)
                    if event.error is None:
                        yield event
                    else:
                        failed = failed or event.error
        finally:
            # Also where the caller closes the stream: whoever uses the engine next finds it idle.
            for request in unfinished.values():
                self.cancel(request)
        if failed is not None:
            raise failed

    def step(self) -> list[Event]:
        """Admit requests, read a chunk, choose each row's next input, release rows that end, feed the others.

        Returns one step's events. A request whose step raises finishes with the error, and the others go on.
        """
        return self.core.step()
