"""The latent engine: continuous batching for models that feed embeddings back.

Requests join and leave at any step. All running rows, thinking or answering, share one forward pass of one position
each. The input of a row (a latent, a token of a chain, the separator that ends its thinking, a token of the answer) is
always an embedding, and its keys and values are written to the row's own next column of the cache.

    step       1    2    3    4    5    6
    row 0      l1   l2   ###  a    EOS           thinks twice, then answers
    row 1      l1   ###  a    EOS                thinks once
    row 2                          l1   l2 ...   waited for a slot

    step = decode the chosen inputs -> schedule -> prefill -> choose the next inputs -> remove rows that end

`step` runs one such step and returns its events; `stream` yields events until no request is left; `generate` collects
them into completions. `async_engine.py` runs an engine for many callers.
"""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from colar.engine import graphs
from colar.engine.cache import SlotCache
from colar.engine.completion import Completion, Event, completions_of
from colar.engine.request import Request, check_runnable, prompt_ids
from colar.engine.runner import Runner
from colar.engine.running import RunningRows, choose_inputs
from colar.engine.scheduler import Entry, QueueFull, Scheduler
from colar.methods.base import Method
from colar.model.latent_lm import LatentLM
from colar.ops import devices

__all__ = ["Engine", "QueueFull"]

OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
"""Parts of the messages of out-of-memory errors that have no class of their own: of CPU allocators, and cuBLAS."""


class Engine:
    """Answers requests with one model and its method.

    At most `max_batch` rows run at a time (None: 256 on a CUDA GPU, else 32), in at most `token_budget` cache positions
    (None: as many as needed); `max_waiting` bounds the requests that wait for a slot (None: no bound). With
    `cuda_graphs` decode steps are recorded as CUDA graphs, which avoids launch overhead (None: only on a GPU, with
    unsharded weights); an idle engine leaves its graphs, and their cache, to the next engine of the model. Weights may
    be trained in place between two calls, but not while requests run. ValueError for a backbone whose attention the
    engine does not support.
    """

    def __init__(
        self,
        lm: LatentLM,
        method: Method,
        max_batch: int | None = None,
        token_budget: int | None = None,
        max_waiting: int | None = None,
        cuda_graphs: bool | None = None,
    ) -> None:
        if cuda_graphs is None:
            cuda_graphs = graphs.can_record(lm)
        if max_batch is None:
            max_batch = devices.requests_at_once(lm.device)
        on_gpu = lm.device.type == "cuda"
        self.scheduler = Scheduler(max_batch, token_budget, max_waiting, cuda_graphs, on_gpu)
        self.runner = Runner(lm, method, max_batch, cuda_graphs)
        self.lm = lm
        self.method = method
        self.running = self._no_rows()
        self._n_requests = 0

    def _no_rows(self) -> RunningRows:
        return RunningRows.start([], torch.empty(0, self.lm.width, device=self.lm.device), {})

    @property
    def cache(self) -> SlotCache:
        """Keys and values of the running rows."""
        return self.runner.cache

    # Requests

    @property
    def busy(self) -> bool:
        """True while a request waits, is in prefill or runs."""
        return bool(self.scheduler.waiting or self.scheduler.batches or self.running.entries)

    def check(self, request: Request) -> tuple[int, ...]:
        """The token ids of a request's prompt. ValueError if the request cannot be run."""
        check_runnable(self.method, request)
        ids = prompt_ids(self.lm, self.method, request)
        self.scheduler.check(request, len(ids))
        return tuple(ids)

    def submit(self, request: Request, ids: tuple[int, ...] | None = None) -> int:
        """Put a request into the queue. Returns its number, which is also that of its events.

        `ids` are those of `check`; without them the request is checked here. ValueError if the request cannot be run,
        QueueFull if `max_waiting` others wait for a slot.
        """
        entry = self._enter(request, ids)
        self.scheduler.add(entry, self.running.entries)
        return entry.number

    def _enter(self, request: Request, ids: tuple[int, ...] | None = None) -> Entry:
        """Number a request, which is checked and tokenised unless its `ids` are given."""
        entry = Entry(self._n_requests, request, self.check(request) if ids is None else ids)
        self._n_requests += 1
        return entry

    @torch.inference_mode(False)
    def cancel(self, request: Request) -> bool:
        """Remove a request, found by identity, waiting or running. No event follows. False if the engine lacks it."""
        was_queued = self.scheduler.cancel(request)
        rows = [i for i, entry in enumerate(self.running.entries) if entry.request is request]
        self.cache.wipe(rows)
        self.running.remove(rows, self.cache)
        self._release_if_idle()
        return was_queued or bool(rows)

    @torch.inference_mode(False)
    def clear(self) -> None:
        """Remove all requests, waiting or running."""
        self.scheduler.waiting.clear()
        self._drop_started()
        self._release_if_idle()

    def _drop_started(self) -> None:
        """Remove all requests that have started, and zero the cache, because they may have left NaN there."""
        self.cache.wipe(list(range(self.cache.size.slots)))
        self.scheduler.batches.clear()
        self.running = self._no_rows()

    def _release_if_idle(self) -> None:
        """Free memory if no request is left."""
        if not self.busy:
            self.runner.release()
            self.scheduler.rows_that_fit = self.scheduler.max_batch

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Completions in the order of the requests. Raises as `stream` does."""
        completions = completions_of(self.lm, self.stream(requests))
        return sorted(completions, key=lambda completion: completion.number)

    def stream(self, requests: Iterable[Request]) -> Iterator[Event]:
        """Events of all requests as they happen. All are checked before the first forward pass.

        Closing the stream cancels the unfinished requests. `max_waiting` does not bound them. A request whose step
        raised yields no "finished"; when all others have finished, the first such error is raised. RuntimeError if
        other requests run or wait, because their events would be mixed into this stream.
        """
        if self.busy:
            raise RuntimeError("the engine is busy with other requests: use step, or an AsyncEngine")
        self.scheduler.waiting.extend([self._enter(request) for request in requests])
        failed: Exception | None = None
        try:
            while self.busy:
                for event in self.step():
                    if event.error is None:
                        yield event
                    else:
                        failed = failed or event.error
        finally:
            # Also if the caller closes the stream: the next caller finds the engine idle.
            self.clear()
        if failed is not None:
            raise failed

    # A step

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self) -> list[Event]:
        """Feed the chosen inputs, admit and prefill requests, choose each row's next input, and remove rows that end.

        Returns the events. If a part of it raises, all requests that have started finish with the error, and waiting
        requests are next. If memory runs out, started requests return to the queue, and fewer run at a time.
        """
        events: list[Event] = []
        # The cache has the weights' own dtype.
        autocast = torch.autocast(self.lm.device.type, enabled=False)
        with self.lm.evaluating(), self.runner.masked_attention(), autocast:
            try:
                self._decode()
                if batch := self.scheduler.schedule(self.running.entries):
                    self._prefill(batch)
                events += self._choose()
                events += self._remove_ended()
            except Exception as error:
                events += self._recover(error)
            except BaseException:
                # An interrupt may have left the rows in an inconsistent state.
                self._drop_started()
                raise
        self._release_if_idle()
        return events

    def _decode(self) -> None:
        """Feed every row the input that the last step chose for it."""
        rows = self.running
        if not len(rows) or rows.next_ND is None:
            return
        started = time.perf_counter()
        span = 1 + max(map(rows.position, range(len(rows))))
        rows.fed(self.runner.decode(rows.next_ND, rows.position_N, span))
        rows.charge(time.perf_counter() - started)

    def _prefill(self, batch: Sequence[Entry]) -> None:
        """Prefill the questions of a batch into the cache; its requests join the running rows."""
        self._make_room()
        rows = self.running
        started = time.perf_counter()
        # Further samples of a question that runs, or comes earlier in the batch, copy it from the cache.
        #
        #     slot        0   1     2   3   4   5        r and s run; the batch is t, u, t and r
        #     question    r   s     t   u   t   r        t and u are prefilled; slot 4 copies slot 2, slot 5 slot 0
        slot_of = {entry.ids: slot for slot, entry in enumerate(rows.entries)}
        questions: list[Entry] = []
        samples: list[Entry] = []
        for entry in batch:
            if entry.ids in slot_of:
                samples.append(entry)
            else:
                slot_of[entry.ids] = len(rows) + len(questions)
                questions.append(entry)

        # The hidden states after all questions that are in the cache, by slot.
        first_ND = rows.first_ND
        if questions:
            hidden_ND = self.runner.prefill([entry.ids for entry in questions], len(rows))
            first_ND = torch.cat([first_ND, hidden_ND]) if len(rows) else hidden_ND
        if samples:
            sources = [slot_of[entry.ids] for entry in samples]
            targets = list(range(len(rows) + len(questions), len(rows) + len(batch)))
            self.cache.copy(sources, targets, max(len(entry.ids) for entry in samples))

        entries = [*questions, *samples]
        slots = devices.numbers([slot_of[entry.ids] for entry in entries], first_ND.device)
        begun = self.method.begin(self.lm, [entry.request for entry in entries])
        joining = RunningRows.start(entries, first_ND[slots], begun)
        joining.charge(time.perf_counter() - started)
        rows.append(joining)
        # Popped only now, so that `_recover` still finds these requests if the prefill raises.
        self.scheduler.batches.popleft()

    def _make_room(self) -> None:
        """Reserve a cache for all requests that have started."""
        rows = self.running
        if not len(rows):
            # The weights may have been trained since the last requests.
            self.runner.refresh_weights()
        started = [*rows.entries, *self.scheduler.in_prefill]
        widest = max(entry.most_positions for entry in started)
        self.cache.reserve(self.scheduler.next_size(self.cache.size, len(started), widest), len(rows))

    def _choose(self) -> list[Event]:
        """Choose each row's next input."""
        rows = self.running
        if not len(rows):
            return []
        started = time.perf_counter()
        events = choose_inputs(self.runner, rows)
        rows.charge(time.perf_counter() - started)
        return events

    def _remove_ended(self) -> list[Event]:
        """Remove the rows that have ended."""
        rows = self.running
        ended = {i: entry for i, entry in enumerate(rows.entries) if entry.reason}
        # The leftovers of a row in its slot are masked for the next one, but a NaN passes through any mask.
        self.cache.wipe([i for i, entry in ended.items() if entry.reason == "error"])
        rows.remove(ended, self.cache)
        # Reported last, when nothing can raise: requests that `_recover` restarts must not have finished.
        return [entry.finished() for entry in ended.values()]

    # A step that raises, because memory has run out or because of a defect
    #
    #     rows       a b c d e f g h          no memory for all of them: all wait again
    #                a b c d                  four at a time, until the engine is idle
    #                a                        none for a alone: it ends with the error
    #
    # Requests start anew from their question, after the event "restarted". Draws are a function of a request's seed and
    # its step, so the answers are the same except for rounding.

    def _recover(self, error: Exception) -> list[Event]:
        """Restart the started requests, fewer at a time, if memory ran out for several; otherwise end them."""
        no_memory = out_of_memory(error)
        if no_memory:
            # The frames of the traceback hold tensors, whose memory is needed now.
            error.__traceback__ = None
            self.runner.free_memory()
            devices.empty_cache(self.lm.device)
        started = [*self.running.entries, *self.scheduler.in_prefill]
        self._drop_started()
        if no_memory and len(started) > 1:
            self.scheduler.rows_that_fit = len(started) // 2
            self.scheduler.put_back(started)
            return [entry.event("restarted") for entry in started]
        if no_memory:
            # The request was too large in isolation: the others may run together again.
            self.scheduler.rows_that_fit = self.scheduler.max_batch
        for entry in started:
            entry.reason, entry.error = "error", error
        return [entry.finished() for entry in started]


def out_of_memory(error: BaseException) -> bool:
    """True if memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)
